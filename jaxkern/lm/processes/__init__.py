"""The processes of a run, on one host or several.

cluster   which process this is, from flags or from what Slurm, Open MPI and Kubernetes set
join      how they work together, and end together; alone, a process does the same by itself
several   one of several processes
wire      their messages, by way of process 0
relay     a program that keeps JAX's client running when process 0 is gone
"""

from jaxkern.lm.processes.join import ALONE as ALONE
from jaxkern.lm.processes.join import Alone as Alone
from jaxkern.lm.processes.join import joined as joined
from jaxkern.lm.processes.join import leave as leave
from jaxkern.lm.processes.join import name as name
