"""Commands that install what may be missing, in their one place."""

TENSORFLOW = "2.15"
INSTALL_TENSORFLOW = (
    f"Install it: pip install 'tensorflow-cpu=={TENSORFLOW}.*', or 'tensorflow=={TENSORFLOW}.*' for GPUs."
)
HOROVOD = "horovod==0.28.1"
# TensorFlow over Gloo, and nothing else.
HOROVOD_CHOICES = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    # cmake 4 refuses the bundled Gloo, which asks for cmake 2.8 behaviour, unless told otherwise.
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
}
# Its build imports these but cannot fetch them itself, because it has to see the installed TensorFlow.
HOROVOD_NEEDS = ("setuptools>=64,<81", "wheel", "cloudpickle", "packaging", "psutil", "pyyaml")
INSTALL_HOROVOD = (
    f"{' '.join(f'{name}={value}' for name, value in HOROVOD_CHOICES.items())} "
    f"pip install --no-build-isolation {HOROVOD}"
)
# For people: it does the same, and keeps the wheel for the next time.
FIX_HOROVOD = "npu-run doctor --fix"
