# The public API, from which `packer/__init__.py` knows where each name is.

from packer.adapter import Adapter as Adapter
from packer.arrival import Arrivals as Arrivals
from packer.arrival import RequestTrace as RequestTrace
from packer.bin import Bin as Bin
from packer.cluster import Cluster as Cluster
from packer.errors import PackerError as PackerError
from packer.evaluation import Evaluation as Evaluation
from packer.evaluation import Evaluations as Evaluations
from packer.gpu import GpuKind as GpuKind
from packer.io.clusters import read_cluster as read_cluster
from packer.io.plans import load_plan as load_plan
from packer.io.profiles import load_profile as load_profile
from packer.io.workloads import read_workload as read_workload
from packer.job import FineTuning as FineTuning
from packer.lengths import Lengths as Lengths
from packer.operate.drift import drift as drift
from packer.operate.evaluate import evaluate_plan as evaluate_plan
from packer.operate.frontier import frontier as frontier
from packer.operate.recommend import recommend as recommend
from packer.operate.schedule import schedule as schedule
from packer.operate.systems import compare_systems as compare_systems
from packer.plan import Plan as Plan
from packer.plan import Status as Status
from packer.predictors.api import evaluate_server as evaluate_server
from packer.predictors.api import load_predictor as load_predictor
from packer.profile import Profile as Profile
from packer.slo import Limits as Limits
from packer.slo import Slo as Slo
from packer.solvers.api import solve as solve
from packer.twin.cluster.simulate import simulate_cluster as simulate_cluster
from packer.twin.result import Simulation as Simulation
from packer.twin.simulate import simulate as simulate
from packer.workload import Workload as Workload

__version__: str
