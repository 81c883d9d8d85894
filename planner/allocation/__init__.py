"""Jobs that share a cluster: which devices and which batch each of them gets, and when it will be done.

`whale.planner.allocation.rules` says what is minimised and how; `speeds` asks the search how fast a job would be.
"""
