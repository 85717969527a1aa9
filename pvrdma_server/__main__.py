"""`python -m pvrdma_server`."""

from pvrdma_server.cli import main

main(prog_name="pvrdma-server")
