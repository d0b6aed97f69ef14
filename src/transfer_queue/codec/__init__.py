"""Columns to bytes and back.

    values ──plan──▶ Plan(layout, pieces to copy) ──write──▶ one block of bytes
    block + layout ──▶ BlockReader ──gather──▶ Column parts ──assemble──▶ values

    plan              from a batch to the layout of its block
     ├─ filling       the layout in the making, and the copies that fill it
     ├─ lists         lists and numpy arrays as tensor columns
     │   └─ numbers   many Python numbers as machine numbers at once
     ├─ nested        nested tensors, built and taken apart
     └─ columns       a column as its rows, one by one
    assemble          from rows of blocks to the values that a caller gets
     ├─ stacks        Python values as a NonTensorStack that makes its members when they are looked at
     ├─ collector     no garbage collection while many values are made (by the client's reads)
     └─ mixing        rows of one field that were put as different things
    layout            where the columns of a block lie, and that they lie within it
    rows, select      rows and columns of blocks at the level of bytes: compaction in the server, reads in the client
    slices            parts of rows: a range of tokens, what one rank takes
    cells             one cell as bytes: what tells it from others
     └─ column_cells  the cells of a column to be put, and which are the same
    needed            which bytes of a block some rows need, where it lies elsewhere
    lone_rows         rows that were put alone, as a matrix of the numbers of their layouts
    joining           the same, written as columns of one block (in the server)
    spread_rows       rows that lie anywhere in several blocks, one pass per field
    values            the safe encoding of Python values
     ├─ arrays        tensors and arrays inside them, as aligned buffers
     ├─ exact         what a message holds where a list, a number or a text belongs
     ├─ classes       enums, dataclasses and named tuples by name and fields
     ├─ data_classes  which of them are data, so that using a value runs no code of its class
     ├─ configs       configs of OmegaConf
     ├─ images        PIL images without pickle
     ├─ registry      the user's own types
     ├─ described     values to look at: nothing of the user's is called, no image opened
     └─ opaque        pickle, only where this process allows it
    packed            values in buffers of the caller's, without a block
    dtypes            torch's dtypes by name

`layout`, `rows`, `cells`, `select`, `lone_rows`, `spread_rows` and `joining` know no torch. `plan` and `assemble` run
in clients only.
"""
