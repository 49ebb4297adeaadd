"""`python -m mlm train` where no file can grow beyond 60 kB: the write of a checkpoint fails as on a full disk."""

import os
import resource
import sys

os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # its files would be cut off too, for all tests

from mlm import __main__

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    sys.exit(__main__.main(sys.argv[1:]))
