"""Runs command lines, each in a forked child of this process, which has imported what they need: `zygote.py FILE`.

FILE is JSON: a list of [module, arguments]. Prints JSON: a list of [exit code, stdout, stderr]. A child has its own
argv, stdout and stderr, and ends as a fresh interpreter does, by `sys.exit` or with a traceback.
"""

import json
import os
import runpy
import sys
import tempfile

import torch  # noqa: F401 - seconds, once for all children


def run(module: str, arguments: list[str]) -> list:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv = [module, *arguments]
            code = 1
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        status = os.waitpid(child, 0)[1]
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="backslashreplace"))
        return [os.waitstatus_to_exitcode(status), *texts]


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        jobs = json.load(file)
    from fastdecode import loading  # noqa: F401

    results = [run(module, arguments) for module, arguments in jobs]
    print(json.dumps(results))
