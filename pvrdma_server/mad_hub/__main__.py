"""`python -m pvrdma_server.mad_hub` is `pvrdma-mad-hub`."""

from pvrdma_server.mad_hub.cli import main

main(prog_name="pvrdma-mad-hub")
