"""What the agent and the workers of one node share: messages, stderr, stacks,
the writer of documents.

It may import the library, never `agent` or `worker`. There are five ways from a worker to its
agent, because each works where others fail:

- datagrams (`channel`): failures, questions and answers. A worker that is stuck or killed leaves no
  connection behind.
- the recorder's socket (`document_writer`): documents. The recorder outlives a killed agent, and
  answers when a document is durable. Before that, the document is in a file of the spool, which
  outlives the SIGKILL of its writer.
- files of stacks, after a signal (`channel`, too). faulthandler's C handler also runs during a C
  call, and can write to nothing but a descriptor.
- a FIFO for each worker (`stderr_relay`): stderr. Native code writes there, and the kernel keeps
  what a killed process wrote.
- a FIFO for each round (`firstfault_torch.watchdog`): deadlines. torch's FileTimerClient writes
  there, too.
"""
