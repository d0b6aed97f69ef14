"""Folders of files that appear whole or not at all, and are read as they were written: checkpoints, dumps, bundles.

places    where a folder lies: a directory, or whatever fsspec opens (`s3://bucket/runs/7`)
 ├─ local     a directory is written beside its place, and renamed
 │    └─ full_disk    where room was missing, and what to do
 └─ remote    files are written below a name of their own, and the list of them comes last
      └─ filesystem  fsspec, whose calls end in time
folder    what both are: `Folder`, and its `Draft`, which nobody sees yet
reading   `SavedFolder`: every byte is verified as it is read
files     the list: sizes and digests of all files, under its own digest
"""
