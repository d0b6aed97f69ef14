"""Every operation of the client once, as a generator that yields effects; `drivers` run them.

rows         put, get and clear rows, fetch metadata
tasks        rows of a task together with their data, in one round trip
kv           rows by the user's keys
update       cells changed by what they hold
partitions   a partition as one object
overview     a look at all of the service, at a partition, at a row
steps        what tasks took in each step of a loop, and going back to one
staleness    versions of the weights, and how many rows may be started
"""
