"""Import paths of TransferQueue that programs use. The package itself does not.

logging_utils    `get_logger`
serial_utils     packed buffers
zmq_utils        `ZMQServerInfo` and `process_zmq_server_info`, to attach a client by hand
"""
