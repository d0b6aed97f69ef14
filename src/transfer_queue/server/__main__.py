from transfer_queue.server.process import main

main()
