"""Whether a run may compute in bfloat16: its model in both dtypes on a few rows."""

from mlm import config as configs
from mlm.data import mixture
from mlm.doctor.checks import DataCase, Finding
from mlm.doctor.first_batch import make_task
from mlm.errors import InputError
from mlm.inference import dtypes
from mlm.pretrained import load
from mlm.training import sharding

ROWS, BATCHES = 8, 4  # of the validation split
LOSS = 0.02  # nats between the dtypes: 2% of perplexity, ten times what sound models show
ACCURACY = 0.02  # a few near ties may go either way, of some hundred predictions


def compare_dtypes(case: DataCase) -> list[Finding]:
    """bfloat16 gives the loss and accuracy of float32, by the newest checkpoint, or the initial model."""
    workdir, manifest = case.workdir, mixture.parts(case.manifest)[0].manifest
    config = configs.replace(case.config, {"evaluate.batch": ROWS})
    tasks = []
    for dtype in dtypes.DTYPES:
        config_of_dtype = configs.replace(config, {"model.dtype": dtype})
        tasks.append(make_task(config_of_dtype, case.manifest, workdir, case.flags.entry.pretraining))
    mesh = tasks[0].mesh
    name, modules = "the initial model", [task.module for task in tasks]
    if case.begun:
        model = load.load(workdir, head=load.LM_HEAD).padded()
        if load.shapes_of(model.params) != load.shapes_of(tasks[0].abstract_state.params):
            raise InputError(f"{model.source}: is not a model as config.model describes it; name the run's config.")
        name, params = f"the checkpoint of step {model.step}", model.params
    else:
        params = tasks[0].initial_state().params
    params = sharding.put_tree(params, sharding.tree_shardings(params, mesh, params, tasks[0].partition_rules()))
    scores = dtypes.compare(
        config, manifest, params, modules, tasks[0].eval_masking, split="validation", mesh=mesh, batch_count=BATCHES
    )
    what = f"{name} in {dtypes.summary(scores)}"
    level, fix = "ok", ""
    if not (abs(scores["loss_difference"]) <= LOSS and abs(scores["accuracy_difference"]) <= ACCURACY):
        level, what = "warning", f"{what}: more than {LOSS} nats or {ACCURACY:.0%} apart"
        fix = "set model.dtype to float32, and look for values that are very large"
    return [Finding(level, what, fix, where=str(workdir.root), check="dtypes")]
