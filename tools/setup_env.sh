#!/bin/sh
# Makes .venv, or completes one that was interrupted; says nothing when it is ready. TF=2.21 in the environment makes
# .venv-tf2.21 with that TensorFlow instead: without, it is the one that the Python found is for.
#
# How much is wanted: `alone` is enough for training on one rank, `ranks` adds Horovod, `all` (the default) the test tools.
#
# Only looks and chooses here, so that whatever is missing is told before anything is installed; the installing is in
# setup_env.py. PYTHON=... in the environment names the interpreter to use.
set -eu
cd "$(dirname "$0")/.."

fail() {
    echo "make venv: $1" >&2
    exit 1
}

version_of() {
    "$1" -c 'import sys; sys.stdout.write("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

tf=${TF:-}
venv=.venv${tf:+-tf$tf}
# TensorFlow 2.15 is for Python 3.9 to 3.11; without a choice, Pythons after that get 2.21.
case "$tf" in
    "") pythons="3.11 3.10 3.9 3.13 3.12" ;;
    2.15) pythons="3.11 3.10 3.9" ;;
    2.16 | 2.17 | 2.18 | 2.19) pythons="3.12 3.11 3.10 3.9" ;;
    2.20) pythons="3.13 3.12 3.11 3.10 3.9" ;;
    2.21) pythons="3.13 3.12 3.11 3.10" ;;
    *) fail "TF=$tf is not supported. Expected 2.15, 2.16, 2.17, 2.18, 2.19, 2.20 or 2.21." ;;
esac
needed="One of Python $(echo $pythons | sed 's/ /, /g') is needed${tf:+ for TensorFlow $tf}"

suitable() {
    case " $pythons " in
        *" $1 "*) return 0 ;;
        *) return 1 ;;
    esac
}

# TensorFlow takes names of files for UTF-8. Python, too, but not in every locale: then neither finds what is installed.
check_path() {
    case $PWD in
        *[!\ -~]*)
            "$1" -c 'import os, sys; sys.exit(os.getcwdb().decode() != os.getcwd())' >/dev/null 2>&1 ||
                fail "the path of this checkout cannot be decoded. Expected ASCII, or UTF-8 in a UTF-8 locale; got $PWD \
in the locale ${LC_ALL:-${LC_CTYPE:-${LANG:-C}}}. Set LC_ALL=C.UTF-8 and unset PYTHONUTF8, or move the checkout."
            ;;
    esac
}

# An environment is ready when setup_env.py came to its end with these files, in this folder: only then
# $venv/ready.PARTS holds this text. Finding out starts no Python (unless PYTHON=... asks for one), so a second `make train` is quick.
parts=${1:-all}
wanted() {
    { cat setup.cfg tools/setup_env.sh tools/setup_env.py; pwd; } | cksum
}
if [ -x $venv/bin/python ] && [ -f "$venv/ready.$parts" ]; then
    if [ -z "${PYTHON:-}" ] || [ "$(version_of "$PYTHON")" = "$(version_of $venv/bin/python)" ]; then
        if [ "$(cat "$venv/ready.$parts")" = "$(wanted)" ]; then
            check_path $venv/bin/python
            exit 0
        fi
    fi
fi

fix="Install one: apt-get install python3.11 python3.11-venv (Debian/Ubuntu), dnf install python3.11 (Fedora), \
brew install python@3.11 (macOS); or name one: make venv PYTHON=/path/to/python3.11"
python=
if [ -n "${PYTHON:-}" ]; then
    found=$(version_of "$PYTHON")
    [ -n "$found" ] || fail "PYTHON=$PYTHON does not run. $needed. $fix"
    suitable "$found" || fail "PYTHON=$PYTHON is Python $found. $needed. $fix"
    python=$PYTHON
else
    seen=
    for candidate in $(printf 'python%s ' $pythons) python3 python; do
        found=$(version_of "$candidate")
        if suitable "$found"; then
            python=$candidate
            break
        fi
        [ -z "$found" ] || seen="${seen:+$seen, }$candidate is $found"
    done
    [ -n "$python" ] || fail "$needed; found ${seen:-no Python at all}. $fix"
fi

check_path "$python"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make environments. Install its venv module: \
apt-get install python$(version_of "$python")-venv (Debian/Ubuntu)"

# A wheel of Horovod that an earlier set-up has kept needs no compiler; nor do trainings, on one rank or several.
kept=no
for wheel in "${XDG_CACHE_HOME:-${HOME:-}/.cache}"/npu_bridge/wheels/python"$(version_of "$python")"-*/horovod-*.whl; do
    [ -f "$wheel" ] && kept=yes
done
if [ "$parts" != all ] || [ $kept = yes ]; then
    exec "$python" tools/setup_env.py "$(wanted)" "$parts" "$tf"
fi

compiler=
for candidate in ${CXX:-} c++ g++ clang++; do
    if command -v "$candidate" >/dev/null 2>&1; then
        compiler=$candidate
        break
    fi
done
[ -n "$compiler" ] || fail "a C++ compiler is missing (Horovod is compiled here). Install it: \
apt-get install g++ (Debian/Ubuntu), dnf install gcc-c++ (Fedora), xcode-select --install (macOS)"

cmake --version >/dev/null 2>&1 || fail "cmake is missing (Horovod is compiled with it). Install it: \
apt-get install cmake (Debian/Ubuntu), dnf install cmake (Fedora), brew install cmake (macOS)"

exec "$python" tools/setup_env.py "$(wanted)" "$parts" "$tf"
