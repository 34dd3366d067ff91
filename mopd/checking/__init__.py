"""`mopd check`: what can be found wrong before a run, and again with its teachers up.

estimates   memory of each kind of process, disk space (reading headers of checkpoints)
live        every teacher started or asked as a run would, and put to the test
command     the rows of all of it, for people and as JSON
"""
