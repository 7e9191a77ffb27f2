#!/usr/bin/env bash
# ./run.sh [--key=value ...]   set up, get the data, train on what this machine has
# ./run.sh test [pytest args]  set up, lint, run the tests, check the records
set -euo pipefail
cd "$(dirname "$0")"

python=${PYTHON:-python3}
if [ ! -x .venv/bin/python ] && ! { [ "${1:-}" != test ] && "$python" -c "import torch, tqdm" 2>/dev/null; }; then
  echo "run.sh: making a virtual environment in .venv (once)"
  "$python" -m venv .venv
fi
[ -x .venv/bin/python ] && python=.venv/bin/python

need=requirements.txt
[ "${1:-}" = test ] && need=requirements-dev.txt
if [ "$python" = .venv/bin/python ] && ! cmp -s "$need" ".venv/installed-$need"; then
  echo "run.sh: installing $need"
  "$python" -m pip install --quiet --disable-pip-version-check -r "$need"
  cp "$need" ".venv/installed-$need"
fi

if [ "${1:-}" = test ]; then
  shift
  "$python" -m ruff check .
  "$python" -m records check
  exec "$python" -m pytest -q "$@" tests
fi

gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
case " $* " in *" --preset=laptop "* | *" --device=cpu "* | *" --help "*) gpus=0 ;; esac
if [ "$gpus" = 0 ]; then
  case " $* " in *" --data_dir"* | *" --load_checkpoint"* | *" --help "*) ;; *)
    "$python" data/prepare.py --python-docs --bytes --out data/pydocs ;;
  esac
  exec "$python" train_gpt.py "$@"
fi
case " $* " in *" --data_dir"* | *" --load_checkpoint"*) ;; *) "$python" data/fineweb.py 9 ;; esac
# torchrun as a module; its own traceback is left out, since train_gpt.py has said what is wrong, and its status kept
exec "$python" -c '
import sys
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
try:
    main()
except ChildFailedError as error:
    sys.exit(error.get_first_failure()[1].exitcode)
' --standalone --nproc_per_node="$gpus" train_gpt.py "$@"
