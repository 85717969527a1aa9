"""Only the hook that has cffi build `pvrdma_server._vfu`; everything else is in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["pvrdma_server/_vfu_build.py:ffibuilder"])
