"""Columns to bytes and back.

    values ──plan──▶ Plan(layout, pieces to copy) ──write──▶ one block of bytes
    block + layout ──▶ BlockReader ──gather──▶ Column parts ──assemble──▶ values

`layout` (no torch) describes where every column of a block lies and checks the bounds. `rows` (no torch) selects and
joins rows of blocks at the level of bytes; compaction in the server and reads in the client both use it. `values`
is the safe encoding of Python values, with `classes` and `images`; `mixing` joins rows that were put as different
things; `columns` takes a column apart into rows. `plan` and `assemble` know torch and run in clients only.
"""
