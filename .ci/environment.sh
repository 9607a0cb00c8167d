# Sourced by ./run and ./test, POSIX sh: sees to it that $root/.venv is what the lock file says.
# The check is a checksum and costs milliseconds; the making is in environment.py, which writes
# the stamp last, so that a making that was interrupted is begun again.

# A stamp names the place too: an environment does not survive being moved.
environment_stamp() {
    echo "$root"
    cksum <"$root/$1"
    cksum <"$root/pyproject.toml"
}

environment_is_made() { # for run | postgres | demo | test
    [ -x "$root/.venv/bin/python" ] &&
        [ -f "$root/.venv/made-for-$1" ] &&
        [ "$(cat "$root/.venv/made-for-$1")" = "$(environment_stamp "$(environment_lock "$1")")" ]
}

environment_lock() {
    case $1 in
    run) echo requirements.lock ;;
    postgres) echo requirements-postgres.lock ;;
    demo) echo requirements-demo.lock ;;
    test) echo requirements-dev.lock ;;
    esac
}

environment_needed() { # the arguments of fencepost
    case $1 in
    demo | pipeline)
        echo demo
        return
        ;;
    esac
    environment_before=
    for environment_argument in "$@" "--store=${FENCEPOST_STORE_URL:-}"; do
        case $environment_argument in
        postgres://* | postgresql://* | --store=postgres://* | --store=postgresql://*)
            echo postgres
            return
            ;;
        esac
        # The address may be in the config file: `url = "postgresql://..."`.
        environment_file=${environment_argument#--config=}
        if [ "$environment_before" = --config ] || [ "$environment_file" != "$environment_argument" ]; then
            if grep -Eqs '^[^#]*postgres(ql)?://' "$environment_file"; then
                echo postgres
                return
            fi
        fi
        environment_before=$environment_argument
    done
    echo run
}

environment_python() {
    for candidate in ${FENCEPOST_PYTHON:-python3.13 python3.12 python3.11 python3 python}; do
        # Being on the PATH is not enough: a version manager's shim may answer with an error.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "fencepost needs Python 3.11 or newer, and found none as: ${FENCEPOST_PYTHON:-python3.13, python3.12, python3.11, python3, python}." >&2
    echo "Install it (Debian: apt install python3 python3-venv; macOS: brew install python) or name one in FENCEPOST_PYTHON." >&2
    return 1
}

environment() { # for run | postgres | demo | test
    # Each of them holds everything that those before it need: an environment never becomes less.
    if [ -f "$root/.venv/made-for-test" ]; then
        set -- test
    elif [ "$1" != test ] && [ -f "$root/.venv/made-for-demo" ]; then
        set -- demo
    elif [ "$1" = run ] && [ -f "$root/.venv/made-for-postgres" ]; then
        set -- postgres
    fi
    if environment_is_made "$1"; then
        return
    fi
    environment_interpreter=$(environment_python)
    lock=$(environment_lock "$1")
    "$environment_interpreter" "$root/.ci/environment.py" "$root" "$lock" "made-for-$1" "$(environment_stamp "$lock")"
}
