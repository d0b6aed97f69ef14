"""Bulk memory of a process, and what is done with it. Nothing here knows rows or sockets; only
`tensors` and what stands below it know torch.

bytes         memory as arrays: what keeps it alive, and where it lies
copy          copies at memory speed, split between threads
processors    how many processors this process may use
pool          huge-page buffers that are reused
heap          what the C library keeps of memory that was freed
memfd         files without a name: how memory is shared
private_map   shared memory mapped so that writes stay in this process
tensors       plain tensors as bytes
streams       work in another thread, in this one's streams of a GPU
pinned        buffers between the host and a GPU, which stay
uploads       host memory to a GPU
downloads     a GPU's memory to the host, step by step
handles       memory of the host or of a GPU that another process maps, by a handle that is JSON
"""
