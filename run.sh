#!/usr/bin/env bash
# ./run.sh [--key=value ...]           set up, get the data, train on what this machine has
# ./run.sh FILE ... [--key=value ...]  the same on your own text: files, folders, .jsonl
# ./run.sh test [pytest args]          set up, lint, run the tests, check the records
set -euo pipefail
trap 'exit 130' INT
{ : >&1; } 2> /dev/null || exec > /dev/null  # closed, as by >&-
self=$(readlink -f -- "$0" 2>/dev/null || printf %s "$0")  # it may be a link, as in ~/bin
unset PYTHONDONTWRITEBYTECODE  # without compiled files, each start would take seconds longer
here=$(CDPATH= cd -- "$(dirname "$self")" && pwd)
case ${PYTHON:-} in
  /*) ;;
  */*) PYTHON=$PWD/$PYTHON ;;  # we are about to change the folder
esac

texts=()
reading=()  # how to read the texts, for data/prepare.py
keys=()
if [ "${1:-}" != test ]; then
  for word in "$@"; do
    case $word in
      --key=* | --split=* | --split_blank=* | --tokens=* | --bytes) reading+=("$word") ;;
      -*) keys+=("$word") ;;
      *)
        if [ ! -e "$word" ]; then
          echo "run.sh: '$word': no such file or folder; options are written --key=value" >&2
          exit 2
        fi
        case $word in
          /*) texts+=("$word") ;;
          *) texts+=("$PWD/$word") ;;  # for the same reason
        esac ;;
    esac
  done
fi
if [ ${#texts[@]} = 0 ]; then
  keys+=(${reading[@]+"${reading[@]}"})  # of no use here: the trainer says so
fi
[ "$PWD" = "$here" ] || echo "run.sh: paths in what follows are relative to $here"
cd "$here"

python=${PYTHON:-python3}
have_environment() { [ -e .venv/bin/activate ]; }  # what venv writes last
if ! have_environment && ! "$python" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then
  echo "run.sh: $python is too old or missing; install Python 3.11 or newer, or name one: PYTHON=python3.12 ./run.sh" >&2
  exit 2
fi
if ! have_environment && ! { [ "${1:-}" != test ] && "$python" -c "import torch, tqdm" 2>/dev/null; }; then
  echo "run.sh: making a virtual environment in .venv (once)"
  if ! said=$("$python" -m venv .venv 2>&1); then
    printf '%s\n' "$said" "run.sh: no virtual environment could be made in .venv; see above" >&2
    exit 2
  fi
fi
have_environment && python=.venv/bin/python

if ! "$python" -c "" 2>/dev/null; then
  echo "run.sh: $python does not run; has the Python that made .venv gone? Remove .venv and start again" >&2
  exit 2
fi

need=requirements.txt
[ "${1:-}" = test ] && need=requirements-dev.txt  # which has the other one, too
if [ "$python" = .venv/bin/python ] && ! cat requirements.txt "$need" | cmp -s - ".venv/installed-$need"; then
  echo "run.sh: installing $need"
  # --no-compile: Python compiles what is imported; pip would compile every file, for most of a minute.
  if ! "$python" -m pip install --quiet --no-compile --disable-pip-version-check -r "$need"; then
    echo "run.sh: $need could not be installed (see above); mend that, and start it again" >&2
    exit 2
  fi
  cat requirements.txt "$need" > ".venv/installed-$need"
fi

if [ "${1:-}" = test ]; then
  shift
  "$python" -m ruff check .
  "$python" -m records check
  # Two processes take the files in turn: many tests wait for other processes. The files that take
  # longest are first, so that no process is left alone with one of them at the end.
  exec "$python" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "$@" \
    tests/test_saving.py tests/test_run.py tests/test_ranks.py tests/test_precision.py \
    tests/test_compiling.py tests/test_sample.py tests/test_optimizer.py tests
fi

asked=" ${keys[*]-} "
for key in ${keys[@]+"${keys[@]}"}; do
  case $key in --help | -h) exec "$python" train_gpt.py "${keys[@]}" ;; esac
done

# Finds misspelt keys and values before data is made or fetched for them.
check_keys() { [ ${#keys[@]} = 0 ] || "$python" train_gpt.py "${keys[@]}" --help > /dev/null; }

# The import takes seconds, in which Ctrl-C would give a traceback.
gpus=$("$python" -c "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)
import torch; print(torch.cuda.device_count())")
case $asked in *" --preset=laptop "* | *" --device=cpu "*) gpus=0 ;; esac

# The tokens that the preset reads: bytes, or GPT-2's. Without a preset, `auto` makes bytes if the
# vocabulary cannot be fetched.
case $asked in
  *" --preset=laptop "* | *" --preset=char "*) tokens=bytes ;;
  *" --preset="[!\ ]*) tokens=gpt2 ;;
  *) tokens=auto; [ "$gpus" = 0 ] && tokens=bytes ;;
esac

if [ ${#texts[@]} -gt 0 ]; then
  case $asked in
    *" --data_dir"*) echo "run.sh: a text of your own and --data_dir contradict each other; leave one out" >&2; exit 2 ;;
  esac
  check_keys
  folder=$("$python" data/prepare.py "${texts[@]}" --tokens=$tokens --print_folder \
    ${reading[@]+"${reading[@]}"})
  keys=(--fit "--data_dir=$folder" ${keys[@]+"${keys[@]}"})
else
  names_data=no
  case $asked in
    *" --data_dir"*) names_data=yes ;;
    *" --resume "* | *" --resume=newest "*)
      log_dir=logs
      for key in "${keys[@]}"; do
        case $key in --log_dir=*) log_dir=${key#*=} ;; esac
      done
      for save in "$log_dir"/*.saved/step_*; do
        if [ -d "$save" ] && [ "${save%.unfinished}" = "$save" ] && [ ! -e "${save%/*}/finished" ]; then
          names_data=yes
        fi
      done ;;
    *" --resume="[!\ ]*) names_data=yes ;;  # a save names its data
  esac
  if [ $names_data = no ] && [ $tokens = bytes ]; then
    [ -d data/pydocs ] || check_keys
    "$python" data/prepare.py --python-docs --bytes --out data/pydocs
  elif [ $names_data = no ] && [ "$gpus" = 0 ] && [ ! -d data/fineweb10B ]; then
    check_keys
    echo "run.sh: this preset wants 2 GB of FineWeb, and without a GPU it would take very long; leave out --preset to" \
      "train laptop, or give a text of your own" >&2
    exit 2
  elif [ $names_data = no ]; then
    check_keys
    "$python" data/fineweb.py 9
  fi
fi

if [ "$gpus" = 0 ]; then
  exec "$python" train_gpt.py ${keys[@]+"${keys[@]}"}
fi
# How many seconds torchrun waits for the last save, when a signal ends it.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
# torchrun as a module. Its own tracebacks are left out, since train_gpt.py has said what is wrong.
exec "$python" -c '
import sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
try:
    main()
except ChildFailedError as error:
    code = error.get_first_failure()[1].exitcode
    sys.exit(code if code >= 0 else 128 - code)  # negative: the number of the signal that killed it
except SignalException as error:
    sys.exit(128 + error.sigval)
' --standalone --nproc_per_node="$gpus" train_gpt.py ${keys[@]+"${keys[@]}"}
