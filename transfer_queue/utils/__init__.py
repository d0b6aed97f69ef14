"""Import paths of TransferQueue that programs use: `logging_utils` and `zmq_utils`. The package itself does not."""
