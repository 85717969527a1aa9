"""The wire formats: one module per C header, under the header's own name.

Contract: nothing here does I/O or keeps state. Every record is a NamedTuple with the C field
names, every format a `Layout` named as the record in capitals (`struct pvrdma_cqe` is `Cqe` and
`CQE`). Integers are little-endian ints; big-endian fields (GID, GUID, immediate data) are `bytes`
in wire order. Values are *not* validated: an unknown opcode or state survives parsing and
emitting, and the reader decides.

Read `layout` first, then `vmw_pvrdma_abi` (work queue entries), `pvrdma_dev_api` (registers, the
shared region, commands), `pvrdma_verbs` (attributes) and `mad` (what travels on QP1). The offsets
are checked against the real headers by tests/unit/test_abi_oracle.py.
"""
