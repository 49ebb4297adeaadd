"""Prints the keys with which a user may log in: those of the nodes' metadata, as Google's agent on a host does.

ssh_keys.py STATE USER
"""

import json
import pathlib
import sys

if __name__ == "__main__":
    for file in pathlib.Path(sys.argv[1], "nodes.d").glob("*.json"):
        for line in (
            json.loads(file.read_text()).get("metadata", {}).get("ssh-keys", "").splitlines()
        ):
            user, _, key = line.partition(":")
            if user == sys.argv[2]:
                print(key)
