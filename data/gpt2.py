"""GPT-2's tokens, by tiktoken, which fetches their vocabulary once."""
from data import BadInput


def load():
    """tiktoken's Encoding. Raises BadInput."""
    try:
        import tiktoken
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # the network, the cache folder, or a missing package
        raise BadInput(f"tiktoken cannot load GPT-2's vocabulary ({type(error).__name__}); run "
                       "once with a network, or set TIKTOKEN_CACHE_DIR to a folder that has it"
                       ) from error
