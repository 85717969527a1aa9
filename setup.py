"""Only the hook that has cffi build the C extensions; everything else is in pyproject.toml."""

from setuptools import setup

setup(
    cffi_modules=[
        "pvrdma_server/_vfu_build.py:ffibuilder",
        "pvrdma_server/_watch_build.py:ffibuilder",
    ]
)
