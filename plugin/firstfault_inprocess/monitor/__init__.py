"""What watches a rank from outside its main thread: the monitor process, and two threads.

The monitor process reports the rank's death, and ends the rank if nothing else can interrupt it. It
is forked before the rank has connections, closes all inherited files, and ends after the rank's
call. The two share memory with the rank's phase and the time of its last progress. One thread
writes that time; a second interrupts the main thread.
"""
