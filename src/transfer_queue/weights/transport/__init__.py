"""Engines bring versions from a trainer to receivers.

registry        engines by name; other packages bring more
trainer         makes versions and leads receivers through the update
adapter_calls   its calls that bring adapters, and a draft by itself
ticket          a version that was published and is on its way
ranks           the ranks of one trainer: what each brings to rank 0, and is told
group_meeting   how they find rank 0 over torch's process group
holder          a rank that does not lead: packs what it holds, and gives it
wants           which parts of the tensors receivers need
pending         a version that is about to be sent, and what is reported of one that was
version_store   which versions a server keeps
version_folders  versions on a file system: names, leases, the newest one, the files of buckets
clients         the calls that bring updates to servers
info            what a trainer tells receivers, and how an update went there
faults          faults of the system as typed errors
base            the same calls at a receiver: fetches, stages, verifies, commits
fetching        the manifest from the trainer, buckets from as many as have them
tracker         who gives which bucket to whom while receivers give them to each other
peers           a receiver among those: what it gives, how it fetches
reports         what receivers report to their trainer
serving         a server of weights: a thread for each peer
protocol        its messages, over a blocking socket
deadline        deadlines, and calls that somebody may never answer

shm, tcp, disk, collective, cuda_ipc    the ways that there are
"""
