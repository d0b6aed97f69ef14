"""What a version is, and how a trainer makes one.

sources        where weights come from: a module, a state dict, a folder of safetensors files
drafts         a model and its draft as one source
packing        tensors into buckets and back
boxes          parts of tensors: cutting, tiling, what a view covers
sharded        which boxes of a DTensor a rank holds
columns        flat arrays of integers in place of an object for each of millions of rows
shard_table    what a rank holds, and what all of them do, in columns
plans          who gives what: shards cut along what receivers want, and where the cells lie
pieces         versions in pieces: packing them, and what a receiver has of them
sealing        the manifest of what ranks have packed, from their digests
delta          the exact difference between two states of a tensor, or of a piece
anchor         the version that receivers have, packed, and what leads from there to the weights now
stored_cells   what a difference has of each cell, and where it lies
manifest       a version as canonical JSON: tensors, their digests, the root that names the content
digest, device  digests of bytes, on the host and where a GPU has them
threads        copying and digesting in threads, where that pays
tensor_memory  memory for buckets and staged tensors, and fast copies into it
spans          which versions made which tokens of a sample
"""
