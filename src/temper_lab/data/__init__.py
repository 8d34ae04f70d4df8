"""Text in, batches out: corpora, packing, the loader, and downloads."""

from temper_lab.data.corpus import Corpus, open_corpus
from temper_lab.data.download import download, download_books
from temper_lab.data.loader import DataFingerprint, Loader, validation_batches
from temper_lab.data.packing import Packer
from temper_lab.data.web import DownloadError

__all__ = [
    "Corpus",
    "DataFingerprint",
    "DownloadError",
    "Loader",
    "Packer",
    "download",
    "download_books",
    "open_corpus",
    "validation_batches",
]
