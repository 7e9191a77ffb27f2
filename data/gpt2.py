"""GPT-2's tokens, by tiktoken, which fetches their vocabulary once."""
import threading
from concurrent.futures import Future

from data import BadInput


def load():
    """tiktoken's Encoding. Raises BadInput.

    tiktoken would wait for a silent network without end. So a thread loads it, which is left behind
    after 30 seconds.
    """
    encoding = Future()

    def work():
        try:
            import tiktoken
            encoding.set_result(tiktoken.get_encoding("gpt2"))
        except Exception as error:  # the network, the cache folder, or a missing package
            encoding.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return encoding.result(timeout=30)
    except Exception as error:
        raise BadInput(f"tiktoken cannot load GPT-2's vocabulary ({type(error).__name__}); run "
                       "once with a network, or set TIKTOKEN_CACHE_DIR to a folder that has it"
                       ) from error
