"""Floor 1: where a run happens. Devices, starting the workers, their failures, and the map of ranks.

devices.py  which device type and how many            launch.py  the agent that starts and watches the workers
command.py  how this very program is run again        worker.py  what a worker does before the program
guard.py    writing a failure down, first of all      report.py  naming the one root cause of a failed run
mesh.py     the ranks of a run and what they exchange           traffic.py  that, counted: calls and bytes by axis
cluster.py  which of several machines this is         nodes.py   what the machines' agents tell each other
affinity.py which CPUs a worker may run on

Only mesh.py and traffic.py import torch when they are imported.
"""
