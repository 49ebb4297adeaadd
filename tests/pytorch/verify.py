"""Runs mlm/export/verify_export.py on several folders in one process, to spare imports; prints a line of JSON each."""

import contextlib
import importlib.util
import io
import json
import pathlib
import sys

file = pathlib.Path(__file__).resolve().parents[2] / "mlm" / "export" / "verify_export.py"
spec = importlib.util.spec_from_file_location("verify_export", file)
verify_export = importlib.util.module_from_spec(spec)
spec.loader.exec_module(verify_export)

for folder in sys.argv[1:]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = verify_export.main([folder])
    print(json.dumps({"code": code, "printed": printed.getvalue()}))
