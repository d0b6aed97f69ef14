"""Live partitions as tables of Arrow: for pandas, polars and DuckDB, for SQL, and as Parquet files.

    partition_table.table ──▶ PartitionTable, which any of these reads in batches (`__arrow_c_stream__`)
    queries.sql           ──▶ DuckDB over such tables, which reads only the columns that a query names
    export.export         ──▶ such a table as files

extras             the packages that this needs, and what is said where they are missing
row_listing        which rows a partition has, with their tags, and which cells of them are written
cell_batches       the cells of these rows, so many at a time as a bound of bytes allows
columns            a field as a column: its type, and tensors as arrays of Arrow
tag_columns        tags as columns
texts              values that are no numbers, as text to look at
partition_table    a partition as a table
queries            SQL over partitions
overview_table     what an overview of the service lists, as tables
export             a table as Parquet, or as a dataset of Hugging Face
table_files        new files of Parquet and Arrow, on the disk as a whole

Nothing is imported here, so that a process without pyarrow can say what it lacks.
"""
