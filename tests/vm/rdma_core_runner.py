"""Runs in the guest, beside a copy of rdma-core's Python tests: one JSON line per test, on standard output.

    cd FOLDER-THAT-HOLDS-tests && python3 rdma_core_runner.py --dev vmw_pvrdma0 --gid 1

rdma-core's own run_tests.py prints for people, and pyverbs' destructors print into the middle of it.
The tests draw the sizes and flags of what they create; here the draw is the same each time. Standard library only.
"""

import json
import os
import random
import sys
import unittest
from collections.abc import Iterator
from types import TracebackType
from typing import Any

_Error = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
# Tests of ibv_create_qp_ex draw creation flags, which the provider lacks; they skip themselves unless they draw none,
# half of the time.
_BAD_DRAW = ("with extended attrs is not supported", "without extended attrs is not supported")
_DRAWS = 16


class _Result(unittest.TestResult):
    """Keeps the last outcome of one test; a failure (its subtests', its tearDown's) outlasts a success."""

    outcome = "none"
    why = ""

    def _note(self, outcome: str, why: str = "") -> None:
        if self.outcome != "failed":
            self.outcome, self.why = outcome, why

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._note("passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._note("skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: _Error) -> None:  # noqa: N802
        self._note("failed", f"{type(err[1]).__name__}: {err[1]}")

    def addError(self, test: unittest.TestCase, err: _Error) -> None:  # noqa: N802
        self.addFailure(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: Any, err: _Error | None) -> None:  # noqa: N802
        if err is not None:
            self.addFailure(test, err)


def _cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from _cases(item)
        else:
            yield item


def _run(test: unittest.TestCase) -> _Result:
    for draw in range(_DRAWS):
        random.seed(f"{test.id()} {draw}")
        result = _Result()
        test.run(result)
        if not result.why.endswith(_BAD_DRAW):
            break
    return result


def main() -> None:
    # As run_tests.py does: the suite imports args_parser from the folder it lies in.
    sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "tests")]
    from args_parser import parser  # type: ignore[import-not-found]  # the guest's

    parser.parse_args()
    import tests

    for test in _cases(unittest.defaultTestLoader.loadTestsFromModule(tests)):
        result = _run(test)
        name = test.id().removeprefix("tests.")
        print(json.dumps({"id": name, "outcome": result.outcome, "why": result.why}), flush=True)


if __name__ == "__main__":
    main()
