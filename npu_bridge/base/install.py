"""Commands that install what may be missing, in their one place."""

TENSORFLOW = "2.15"
INSTALL_TENSORFLOW = (
    f"Install it: pip install 'tensorflow-cpu=={TENSORFLOW}.*', or 'tensorflow=={TENSORFLOW}.*' for GPUs."
)
INSTALL_HOROVOD = (
    "HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_PYTORCH=1 "
    "HOROVOD_WITHOUT_MXNET=1 CMAKE_POLICY_VERSION_MINIMUM=3.5 pip install --no-build-isolation horovod==0.28.1"
)
