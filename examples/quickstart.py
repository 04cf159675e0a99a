"""A federation in Python: describe a job, simulate it, inspect the run, compare two methods.

Run it in a folder with a copy of tools/lab/demo/digits.npz. It needs torch for the initial weights, pandas for the
frames and matplotlib for the report: pip install '.[train,onnx,frames,report]'
"""

import fedquilt as fq

job = fq.Job(
    method="fedprox",
    params={"mu": 0.1, "lr": 0.2},
    rounds=20,
    model=fq.models.mlp(64, [32], 10),
    data=fq.Data("digits.npz", partition="dirichlet", alpha=0.5),
    cohort=fq.Cohort(size=5, deadline="predicted"),
    fleet=fq.Fleet(10, boards=["jetson-nano", "raspberry-pi-5"]),
)
run = fq.simulate(job, seed=0, workers=2)  # the coordinator's own rounds
print(run.rounds().to_pandas())  # accuracy, loss, seconds, joules, bytes
print(run.devices())
print(*run.why("jetson-nano-02"), sep="\n")
run.report("run.html")
run.export("net.onnx")
print(fq.compare([job, job.replace(method="scaffold")], seeds=range(3)).table(target=0.8))
