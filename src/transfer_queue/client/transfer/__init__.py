"""The bytes of rows on their way between the caller and where they lie.

write        a planned batch: allocate, copy, commit
share        a batch of which the partition may have cells already: what is the same is stored once
read         one round trip that locates and pins, then views or gathers
parts        fields of which only parts of the rows are read
on_device    rows that are wanted on a GPU
located      the blocks of an answer as memory of this process
allocation   tensors that already lie in the store, filled by the caller
remote       blocks of other hosts
snapshots    everything at once, for `transfer_queue.checkpoint`
"""
