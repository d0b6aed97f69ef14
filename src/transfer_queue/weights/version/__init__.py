"""What a version is, and how a trainer makes one.

sources        where weights come from: a module, a state dict, a folder of safetensors files
packing        tensors into buckets and back
boxes          parts of tensors: cutting, tiling, what a view covers
sharded        which boxes of a DTensor a rank holds
pieces         versions in pieces: shards cut along what receivers want, packed, sealed
delta          the exact difference to an earlier version
manifest       a version as canonical JSON: tensors, their digests, the root that names the content
digest, device  digests of bytes, on the host and where a GPU has them
tensor_memory  memory for buckets and staged tensors, and fast copies into it
spans          which versions made which tokens of a sample
"""
