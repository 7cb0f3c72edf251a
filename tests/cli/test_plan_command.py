"""``dsx plan`` from end to end, for a cluster of one site and of several."""

import json
import re

import pytest

from dsx.cli.app import main
from dsx.config.resolve import resolve
from dsx.errors import ConfigError
from dsx.planner.cluster import LinkConfig, read_cluster
from loaded import DSX, loaded_by

COMMAND = ("plan",)
TINY = ("--model", "llama/tiny", "--cluster", "CPU", "--gpus", 4)
SIZES = ("--global-batch", 16, "--sequence-length", 128)


@pytest.fixture
def cluster(tmp_path):
    def write(content):
        file = tmp_path / "cluster.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return file

    return write


def test_prints_what_is_best_and_why(dsx):
    code, out, err = dsx(*TINY, *SIZES)
    assert (code, err) == (0, "")
    words = ("llama, 804k parameters on 4 x CPU", "best: tensor 1, pipeline 1, data 4", "recompute full: +")
    titles = ("step", "tokens/s", "MFU", "bubble", "commun.", "memory", "layout")
    assert not [each for each in (*words, *titles, "tensor-parallel communication +") if each not in out]


def test_written_config_is_the_plan(dsx, tmp_path):
    """Every mesh's best layout gives a config that resolves to just that layout."""
    out = tmp_path / "planned.json"
    fixed = ("--tensor", 2, "--pipeline", 2)
    code, text, _ = dsx(*TINY, *SIZES, *fixed, "--format", "json", "--output", out)
    found = json.loads(text)
    best, content = found["best"][0], json.loads(out.read_text())
    assert code == 0
    assert content == found["config"]
    run = resolve(out, world_size=4)
    assert (run.mesh.tp, run.mesh.pp, run.mesh.dp) == (best["tensor"], best["pipeline"], best["data"])
    assert (run.chunks, run.schedule_name) == (best["chunks"], best["schedule"])
    assert (run.micro_batch_size, run.zero_stage) == (best["micro_batch"], best["zero_stage"])
    assert (run.global_batch_size, run.sequence_length) == (16, 128)
    assert run.dsx.recompute == best["recompute"]
    assert sum(best["parts_seconds"].values()) == pytest.approx(best["step_seconds"])
    assert best["tokens_per_second"] == pytest.approx(16 * 128 / best["step_seconds"])
    assert 0 < best["mfu"] < 1
    assert (best["fits"], best["peak_is_bound"]) == (True, False)


def test_estimate_agrees(dsx, tmp_path):
    """Step and memory of the written config, as ``dsx estimate`` has them, are the plan's."""
    from dsx.memory.estimate import estimate_run
    from dsx.memory.job import job_of
    from dsx.planner.cluster import preset
    from dsx.planner.predicted import predicted_step

    out = tmp_path / "planned.json"
    sizes = ("--global-batch", 32, "--sequence-length", 1024, "--tensor", 2, "--pipeline", 4)
    model = ("--model", "gpt2-large", "--cluster", "A100-80", "--gpus", 16, "--zero", 1)
    code, text, _ = dsx(*model, *sizes, "--format", "json", "--output", out)
    best = json.loads(text)["best"][0]
    run = resolve(out, world_size=16)
    assert code == 0
    assert predicted_step(run, preset("A100-80")).seconds == pytest.approx(best["step_seconds"])
    assert estimate_run(job_of(run)).peak_bytes == best["peak_bytes"]


def test_check_accepts_the_written_config(dsx, tmp_path, monkeypatch, capsys):
    from dsx.cli.app import main

    out = tmp_path / "planned.json"
    assert dsx(*TINY, *SIZES, "--output", out)[0] == 0
    monkeypatch.setattr("sys.argv", ["dsx", "check", str(out), "--gpus", "4"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "16 sequences of 128 tokens" in capsys.readouterr().out


def test_everything_else_comes_from_a_config(dsx, tmp_path):
    """Optimizer, data, precision and tracking are the user's; the layout is not."""
    base = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "Lion", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000000},
        "dsx": {
            "model": {"family": "gpt2", "preset": "tiny"},
            "parallel": {"tensor": 8},
            "recompute": "full",
            "data": {"source": "here.txt", "sequence_length": 64},
            "train": {"steps": 7, "output": "there"},
        },
    }
    file, out = tmp_path / "base.json", tmp_path / "out.json"
    file.write_text(json.dumps(base))
    words = (file, "--cluster", "CPU", "--gpus", 2, "--output", out, "--set")
    zero = ("zero_optimization.stage=1", 'zero_optimization={"stage":3}')
    for decided in ("dsx.recompute=none", "dsx.parallel.tensor=2", *zero):
        code, _, err = dsx(*words, decided)
        assert (code, f"--set {decided}: a plan decides it" in err) == (2, True)
    base["dsx"]["train"]["steps"] = 9
    assert dsx(*words, "dsx.train.steps=9")[::2] == (0, "")
    found = json.loads(out.read_text())
    assert found["optimizer"] == base["optimizer"]
    assert found["zero_optimization"]["reduce_bucket_size"] == 1000000
    assert [found["dsx"][key] == base["dsx"][key] for key in ("data", "train", "model")] == [True] * 3
    assert found["dsx"]["parallel"]["tensor"] != 8
    assert found["train_batch_size"] == 16
    resolve(out, world_size=2)


def test_an_ordinary_json_with_a_model(dsx, tmp_path):
    """What it says stays; a batch that only the Trainer would fill in is asked for."""
    file, out = tmp_path / "ds_config.json", tmp_path / "best.json"
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    content = {"gradient_accumulation_steps": "auto", "optimizer": optimizer, "gradient_clipping": 0.5}
    file.write_text(json.dumps(content))
    arguments = (file, "--model", "llama/tiny", "--cluster", "CPU", "--gpus", 2)
    code, _, err = dsx(*arguments)
    assert (code, "--global-batch: it is needed" in err) == (2, True)
    assert dsx(*arguments, *SIZES, "--output", out)[0] == 0
    found = json.loads(out.read_text())
    assert (found["gradient_clipping"], found["optimizer"]) == (0.5, optimizer)
    assert resolve(out, world_size=2).global_batch_size == 16
    put = [each for item in ("data.sequence_length=64", "train.steps=9") for each in ("--set", f"dsx.{item}")]
    assert dsx(*arguments, "--global-batch", 16, "--output", out, *put)[::2] == (0, "")
    run = resolve(out, world_size=2)
    assert (run.sequence_length, run.dsx.data.source, run.dsx.train.steps) == (64, "python-stdlib", 9)
    code, _, err = dsx(*arguments, *SIZES, "--set", "dsx.train.stepz=9")
    assert (code, "dsx.train.stepz = 9" in err) == (2, True)


def test_memory_decides(dsx):
    """Less memory: the best layout is slower, and says that it stays within it."""
    wide = ("--model", "llama-3-8b", "--cluster", "H100", "--gpus", 8, "--global-batch", 16)
    sizes = ("--sequence-length", 4096, "--tensor", 2, "--pipeline", 2, "--zero", 1, "--format", "json")
    step = []
    for gib in (70, 30):
        code, out, _ = dsx(*wide, *sizes, "--gpu-memory", gib)
        best = json.loads(out)["best"][0]
        assert code == 0
        assert best["peak_bytes"] <= gib << 30
        step.append(best["step_seconds"])
    assert step[1] > step[0]


def test_nothing_fits(dsx):
    code, out, err = dsx("--model", "llama-3-70b", "--cluster", "H100", "--gpus", 8, *SIZES)
    assert (code, out) == (1, "")
    assert "no layout of the model fits; the nearest takes" in err
    assert "Fix: use more GPUs" in err


def test_a_cluster_of_ones_own(dsx, cluster):
    """A known GPU with slower links: tensor parallelism costs more."""
    wide = ("--model", "llama-3-8b", "--gpus", 8, "--global-batch", 32, "--sequence-length", 2048)
    rest = ("--tensor", 8, "--top", 1, "--format", "json")
    slow = cluster({"gpu": "H100", "inside": {"gigabytes_per_second": 32}})
    shares = []
    for name in ("H100", slow):
        code, out, _ = dsx(*wide, *rest, "--cluster", name)
        assert code == 0
        shares.append(json.loads(out)["best"][0]["communication_share"])
    assert shares[1] > 2 * shares[0]


_LINKS = {"inside": {"gigabytes_per_second": 32}, "between": {"gigabytes_per_second": 8}}
_WHOLE = {"gpus_per_node": 8, "memory_gigabytes_per_second": 900, "teraflops": {"bf16": 100}, **_LINKS}


@pytest.mark.parametrize(
    ("content", "reserved_gib"),
    [
        ({"gpu": "H100"}, 2 + 79 / 25),
        ({"gpu": "H100", "memory_gib": 25}, 3),
        ({"gpu": "A100-80", "memory_gib": 25, "reserved_gib": 1}, 1),
        ({"gpu": "CPU", "memory_gib": 16}, 0),
        ({"gpu": "H100", "memory_gib": 64, "is_host": True}, 0),
        ({**_WHOLE, "memory_gib": 50}, 4),
        ({**_WHOLE, "memory_gib": 50, "is_host": True}, 0),
    ],
)
def test_the_reserve_is_of_the_memory_that_a_file_gives(cluster, content, reserved_gib):
    from dsx.planner.cluster import read_cluster

    assert read_cluster(str(cluster(content))).reserved_bytes == pytest.approx(reserved_gib * 2**30, abs=1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"gpu": "H1000"}, ("H1000", "A100-80")),
        ({"gpu": "H100", "memory_gib": -3}, ("memory_gib = -3",)),
        ({"gpu": "H100", "memmory_gib": 3}, ("memmory_gib", 'write "memory_gib"')),
        ({"gpu": "H100", "between": {"latency_microseconds": -1}}, ("between.latency_microseconds = -1",)),
        ({"gpu": "H100", "reserved_gib": 100}, ("reserved_bytes", "nothing is left")),
        ({"gpus_per_node": 4}, ("memory_gib", "left out")),
        ({"gpu": "H100", "nodes": 1, "gpus_per_node": 2}, ("--gpus 4", "at most 2")),
        ("{", ("not JSON",)),
    ],
)
def test_bad_clusters(dsx, cluster, content, words):
    file = cluster(content)
    code, out, err = dsx("--model", "llama/tiny", "--cluster", file, "--gpus", 4, *SIZES)
    assert (code, out) == (2, "")
    assert err.count("dsx:") == 1
    assert all(word in err for word in words), err


MEANT = {
    "inside": "within intra_node intra_node_bandwidth nvlink NVLink-GBps pcie local scale_up internal_gbps",
    "between": "inter_node network network_gbps infiniband ib_bandwidth roce ethernet nic scale-out outer",
    "across": "wan inter_site inter_datacenter_gbps between_sites dcn",
    "memory_gib": "memory memory_gb VRAM hbm_gb gpu_memory gpu_memory_gib memory_bytes mem memory_size",
    "memory_gigabytes_per_second": "memory_bandwidth hbm_bandwidth memory_bw mem_gbps vram_bandwidth_gb_s",
    "teraflops": "tflops flops peak_flops bf16_tflops peak_tflops_bf16",
    "gpus_per_node": "gpus devices_per_node num_gpus n_gpus_per_node gpu_count procs_per_node",
    "nodes": "num_nodes node_count hosts max_nodes machines",
    "failures": "mtbf_hours node_mttf failure_rate",
    "gigabytes_per_second": "bandwidth bw GBps bandwidth_gbps gb_s gigabits_per_second gbit gb_per_sec",
    "latency_microseconds": "latency latency_us latency_ms alpha delay rtt latency_seconds",
}


UNITS = dict.fromkeys(("inside", "between", "across", "gigabytes_per_second"), "8 Gbit/s are 1")
UNITS |= {"memory_gigabytes_per_second": "1 TB/s is 1000", "latency_microseconds": "1 ms is 1000"}


@pytest.mark.parametrize("key", MEANT)
def test_other_names_of_a_clusters_keys(cluster, key):
    """What others call a link, a rate, a latency or a size is answered by the key that means it."""
    for word in MEANT[key].split():
        content = {"across": {word: 3}} if key in LinkConfig.model_fields else {word: 3}
        with pytest.raises(ConfigError) as caught:
            read_cluster(str(cluster({"gpu": "H100"} | content)))
        assert f'write "{key}", if that is meant' in caught.value.fix, (word, str(caught.value))
        assert UNITS.get(key, "") in caught.value.fix


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--cluster": "H101"}, ("H101", "H100")),
        ({"--cluster": "there.json"}, ("there.json", "no such file")),
        ({"--gpus": 0}, ("--gpus 0",)),
        ({"--gpus": -4}, ("--gpus -4",)),
        ({"--gpus": 12}, ("--gpus 12", "8 or 16")),
        ({"--gpus": 100, "--cluster": "GB200"}, ("as many hosts of each node: 96 or 104",)),
        ({"--gpus": 289, "--cluster": "GB200"}, ("288 or 300",)),
        ({"--gpus": 16, "--cluster": "4090"}, ("--gpus 16", "RTX-4090 has 1 node of 8")),
        ({"--global-batch": 0}, ("--global-batch 0",)),
        ({"--global-batch": -16}, ("--global-batch -16",)),
        ({"--sequence-length": -1}, ("--sequence-length -1",)),
        ({"--sequence-length": 4096}, ("4096", "1024 positions")),
        ({"--model": "nonsense"}, ("nonsense", "no such preset")),
        ({"--model": "FOLDER"}, ("config.json",)),
        ({"--tensor": 16, "--gpus": 16}, ("tensor = 16", "attention heads = 8", "1, 2, 4")),
        ({"--tensor": 3}, ("tensor = 3", "do not divide")),
        ({"--pipeline": 0}, ("--pipeline 0",)),
        ({"--pipeline": 8, "--gpus": 8}, ("pipeline = 8", "4 blocks")),
        ({"--zero": 4}, ("--zero 4",)),
        ({"--micro-batch": 3}, ("--micro-batch 3", "16")),
        ({"--micro-batch": 16, "--tensor": 1, "--pipeline": 1}, ("--micro-batch 16", "4 sequences")),
        ({"--gpu-memory": -1}, ("--gpu-memory -1",)),
        ({"--set": "dsx.train.steps=3"}, ("--set dsx.train.steps=3", "no CONFIG")),
        ({"--output": "no/such.json"}, ("--output", "No such file")),
    ],
)
def test_bad_usage(dsx, tmp_path, changes, words):
    options = {
        "--model": "llama/tiny",
        "--cluster": "CPU",
        "--gpus": 4,
        "--global-batch": 16,
        "--sequence-length": 128,
    }
    options |= {key: tmp_path if value == "FOLDER" else value for key, value in changes.items()}
    code, out, err = dsx(*(item for pair in options.items() for item in pair))
    assert (code, out) == (2, "")
    assert err.count("dsx:") == 1
    assert all(word in err for word in words), err


BLOCK = {
    "model": {"family": "llama", "preset": "tiny"},
    "data": {"source": "here.txt", "sequence_length": 128},
    "train": {"steps": 10, "output": "there"},
}


@pytest.fixture
def config(tmp_path):
    def write(block, **keys):
        file = tmp_path / "config.json"
        optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        file.write_text(json.dumps({"train_batch_size": 8, "optimizer": optimizer, "dsx": block} | keys))
        return file

    return write


def test_offload_needs_zero(dsx, config):
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    rest = (config(BLOCK, zero_optimization=offload), "--cluster", "CPU", "--gpus", 2)
    code, out, err = dsx(*rest, "--format", "json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert {each["zero_stage"] for each in (*found["best"], *found["one_thing_changed"])} <= {1, 2, 3}
    assert found["config"]["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    code, _, err = dsx(*rest, "--zero", 0)
    assert (code, "--zero 0" in err) == (2, True)


def test_an_optimizer_whose_memory_nobody_knows(dsx, config):
    unknown = {"type": "Adagrad", "params": {"lr": 1e-4}}
    code, _, err = dsx(config(BLOCK, optimizer=unknown), "--cluster", "CPU", "--gpus", 2)
    assert (code, "optimizer" in err, err.count("dsx:")) == (2, True, 1)


def test_a_context_axis_is_kept_as_written(dsx, config, tmp_path):
    """By CONFIG or by an option; the estimate of what is written is the plan's."""
    from dsx.memory.estimate import estimate_run
    from dsx.memory.job import job_of

    out = tmp_path / "planned.json"
    rest = ("--cluster", "CPU", "--gpus", 2, "--format", "json", "--output", out)
    for block, option in ((BLOCK | {"parallel": {"context": 2}}, ()), (BLOCK, ("--context", 2))):
        code, text, err = dsx(config(block), *rest, *option)
        best = json.loads(text)["best"][0]
        run = resolve(out, world_size=2)
        assert (code, err, best["context"], run.mesh.cp) == (0, "", 2, 2)
        assert (best["data"], run.dsx.parallel.method) == (1, best["context_method"])
        assert best["parts_seconds"]["context communication"] > 0
        assert estimate_run(job_of(run, device="cpu")).peak_bytes == best["peak_bytes"]


@pytest.mark.parametrize("missing", ["--model", "--global-batch", "--sequence-length"])
def test_what_is_missing(dsx, missing):
    options = {"--model": "llama/tiny", "--global-batch": 16, "--sequence-length": 128}
    given = [item for key, value in options.items() if key != missing for item in (key, value)]
    code, _, err = dsx("--cluster", "CPU", "--gpus", 4, *given)
    assert (code, missing in err) == (2, True)


def test_it_counts_what_it_compares_of_how_many(dsx, monkeypatch):
    told = []
    monkeypatch.setattr("dsx.waiting.Waiting.stands", lambda _, *stands: told.append(stands))
    code, out, _ = dsx(
        *("--model", "llama/tiny", "--cluster", "CPU", "--gpus", 2),
        *("--global-batch", 8, "--sequence-length", 64),
    )
    assert code == 0
    every = [stands for stands in told if stands[0] == "comparing"]
    total = len(every)
    assert total > 10
    assert every == [("comparing", done, total) for done in range(1, total + 1)] == told[:total]
    told_in_all = re.search(r"(\d+) layouts simulated, (\d+) memories estimated", " ".join(out.split()))
    simulated, estimated = told_in_all.groups()
    last = int(simulated) + int(estimated) - 1  # each is told before it is begun
    assert told[-1] == ("simulating the fastest", last, None)


def test_needs_no_torch():
    model = ("--model", "llama/tiny", "--cluster", "CPU", "--gpus", 2)
    _, loaded = loaded_by(DSX, "plan", *model, "--global-batch", 8, "--sequence-length", 64)
    assert not loaded & {"torch", "deepspeed", "numpy"}


OFFICES = {
    "gpu": "CPU",
    "name": "two offices",
    "sites": 2,
    "across": {"gigabytes_per_second": 0.0125, "latency_microseconds": 25000},
}
MODEL = ("--model", "llama/tiny", "--sequence-length", 128)
FIXED = ("--micro-batch", 1, "--tensor", 1)


@pytest.fixture
def offices(tmp_path):
    def write(**changes):
        file = tmp_path / "offices.json"
        content = {key: value for key, value in (OFFICES | changes).items() if value is not None}
        file.write_text(json.dumps(content))
        return file

    return write


def test_two_sites(dsx, offices, tmp_path, monkeypatch, capsys):
    cluster, out = offices(), tmp_path / "planned.json"
    sizes = ("--gpus", 4, "--global-batch", 8)
    code, text, err = dsx(*MODEL, *FIXED, *sizes, "--cluster", cluster, "--output", out)
    assert (code, err) == (0, "")
    assert text.startswith("2 sites, 100 Mbit/s and 25 ms between them\n  one job over all sites: ")
    assert "\n  an island on each: " in text
    assert "\nislands pay: " in text
    assert "llama, 804k parameters on 2 x two offices, 4 sequences of 128 tokens per step" in text

    content = json.loads(out.read_text())
    run = resolve(out, world_size=4)
    assert (run.islands.count, run.islands.ranks, run.global_batch_size) == (2, 2, 4)
    outer = run.dsx.outer
    assert f"(every {outer.every}, wire {outer.wire}; chosen)" in text
    assert run.dsx.train.steps >= 2 * outer.every

    monkeypatch.setattr("sys.argv", ["dsx", "estimate", str(out), "--gpus", "4", "--cluster", str(cluster)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "one of 2 islands" in capsys.readouterr().out

    # What is written is kept: the batch of one island, and how they meet.
    content["dsx"]["outer"] = {"islands": 2, "every": 40, "shares": 2, "delay": 3}
    out.write_text(json.dumps(content))
    code, text, err = dsx(out, *FIXED, "--gpus", 4, "--cluster", cluster, "--format", "json")
    found = json.loads(text)
    assert (code, err) == (0, "")
    assert found["config"]["train_batch_size"] == 4
    assert found["config"]["dsx"]["outer"] == {"islands": 2, "every": 40, "shares": 2, "delay": 3}
    islands, one = found["sites"]["islands"], found["sites"]["one_job"]
    assert islands["given"]
    assert islands["tokens_per_second"] == pytest.approx(
        8 * 128 * islands["of_speed_without_link"] / islands["step_seconds"]
    )
    assert one["tokens_per_second"] == pytest.approx(8 * 128 / one["step_seconds"])
    assert found["sites"]["islands_pay"] == (islands["tokens_per_second"] > one["tokens_per_second"])


@pytest.mark.parametrize(
    ("changes", "gpus", "batch", "what"),
    [
        ({"sites": 0}, 4, 8, "sites"),
        ({"across": None}, 4, 8, "sites = 2"),
        ({"across": {"latency_microseconds": 20000}}, 4, 8, "sites = 2"),
        ({"sites": 1}, 4, 8, "sites = 1"),
        ({"sites": None}, 4, 8, "sites = 1"),
        ({"across": {"gigabytes_per_second": -1}}, 4, 8, "across.gigabytes_per_second = -1"),
        ({}, 5, 8, "--gpus 5: each of the 2 sites of two offices has as many, in whole nodes of 8. Fix: "),
        ({}, 24, 24, "--gpus 24"),
        ({"nodes": 1}, 32, 32, "--gpus 32: two offices has 2 sites of 1 node of 8. Fix: use at most 16"),
        ({}, 0, 8, "--gpus 0"),
        ({}, 4, 9, "--global-batch 9: each of the 2 sites reads as many sequences. Fix: use a multiple of 2"),
    ],
)
def test_refused(dsx, offices, changes, gpus, batch, what):
    code, out, err = dsx(
        *MODEL, *FIXED, "--cluster", offices(**changes), "--gpus", gpus, "--global-batch", batch
    )
    assert (code, out, what in err, "Fix: " in err, err.count("\n")) == (2, "", True, True, 1)


@pytest.mark.parametrize(
    ("key", "value", "cluster", "what"),
    [
        ("outer", {"islands": 3}, {}, "dsx.outer.islands = 3: a plan has an island on each site"),
        ("outer", {"islands": 2}, {"sites": 1, "across": None}, "cluster two offices has one site"),
        # What islands cannot be combined with is refused here, not by the run.
        ("data", {"source": "here", "streaming": True, "sequence_length": 128}, {}, "dsx.data.streaming"),
    ],
)
def test_refused_configs(dsx, offices, config, key, value, cluster, what):
    file = config(BLOCK | {key: value}, train_batch_size=4)
    code, out, err = dsx(file, "--cluster", offices(**cluster), "--gpus", 4, *FIXED)
    assert (code, out) == (2, "")
    assert what in err
    assert "Fix: " in err


def test_a_layer_list_is_planned_for_one_site(dsx, offices, tmp_path):
    layers, config = tmp_path / "mine.py", tmp_path / "ds.json"
    layers.write_text("def make():\n    raise AssertionError('not asked')\n")
    config.write_text(
        json.dumps({"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    )
    code, out, err = dsx(config, "--layers", f"{layers}:make", "--cluster", offices(), "--gpus", 4)
    assert (code, out) == (2, "")
    assert "cluster two offices: sites = 2: a layer list is planned for one of them. Fix: " in err


FAULTS = [
    ({}, ""),
    (None, ""),
    ({"faults": None}, ""),
    (3, "dsx = 3: "),
    ({"faults": [1]}, "dsx.faults = [1]"),
]
FAULTS += [({"faults": {"hang_seconds": "a"}}, 'dsx.faults.hang_seconds = "a"')]


@pytest.mark.parametrize(("block", "words"), FAULTS)
def test_faults_in_a_layer_lists_config_are_judged(dsx, tmp_path, block, words):
    layers, config = tmp_path / "mine.py", tmp_path / "ds.json"
    layers.write_text("import dsx\n\ndef make():\n    raise dsx.ConfigError('it', 'began', 'stop')\n")
    content = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}, "dsx": block}
    config.write_text(json.dumps(content))
    code, _, err = dsx(config, "--layers", f"{layers}:make", "--cluster", "CPU", "--gpus", 4, "--goodput")
    assert (code, (words or "it: began") in err) == (2, True), err


def test_an_elastic_run_is_compared_on_one_site(offices, config):
    file = config(BLOCK | {"elastic": {"cluster": str(offices())}})
    with pytest.raises(
        ConfigError, match=r"cluster two offices: sites = 2: runs are compared on one of them\. Fix"
    ):
        resolve(file, world_size=4)
