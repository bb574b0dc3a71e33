#!/bin/sh
# Makes .venv-tf115, a folder with the genuine TensorFlow 1.15, which needs Python 3.7; without one it says so, and that
# is not an error. PYTHON37=... in the environment names the interpreter.
set -eu
cd "$(dirname "$0")/.."
[ ! -f .venv-tf115/ready ] || exit 0
for python in ${PYTHON37:+"$PYTHON37"} python3.7 "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.7*/bin/python; do
    if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 7))' 2>/dev/null; then
        "$python" -m venv .venv-tf115
        .venv-tf115/bin/python -m pip install --quiet --disable-pip-version-check \
            tensorflow==1.15.5 "protobuf<3.21" "numpy<1.19" "scikit-learn<1.1"
        touch .venv-tf115/ready
        exit 0
    fi
done
echo "make venv-tf115: no Python 3.7 was found (PYTHON37=, python3.7, pyenv), so TensorFlow 1.15 is not installed."
