"""`reprise-tokenizer`: the tokenizer service."""

from reprise_runtime.service import run_service
from reprise_tokenizer.app import TokenizerApp
from reprise_tokenizer.settings import TokenizerSettings


def main() -> None:
    run_service(TokenizerSettings, TokenizerApp)


if __name__ == "__main__":
    main()
