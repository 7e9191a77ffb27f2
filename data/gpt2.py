"""GPT-2's tokens, by tiktoken, which fetches their vocabulary once."""
import threading

from data import BadInput


def load(seconds=30):
    """tiktoken's Encoding. Raises BadInput.

    tiktoken would wait for a silent network without end. So a thread loads it, and if that takes
    longer than `seconds`, it is left behind.
    """
    result = []
    faults = ["TimeoutError"]

    def work():
        try:
            import tiktoken
            result.append(tiktoken.get_encoding("gpt2"))
        except Exception as error:  # the network, the cache folder, or a missing package
            faults[:] = [type(error).__name__]

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not result:
        raise BadInput(f"tiktoken cannot load GPT-2's vocabulary ({faults[0]}); run once "
                       "with a network, or set TIKTOKEN_CACHE_DIR to a folder that has it")
    return result[0]
