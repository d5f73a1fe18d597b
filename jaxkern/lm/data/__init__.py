"""Files of text -> tokens on disk -> batches.

sources    what --data names: files of documents, found
documents  the documents of a file, read
corpus     the bytes of documents in two packed files, and random windows of them
tokenizer  bytes, a tokenizer.json, a BPE of the data
pieces     files, divided between shards
shards     documents -> tokens on disk, by several processes
packed     windows of packed documents, in an order that a seed decides
build      the tokens of a run: made, found again, opened
files      small files of a run, written whole
"""

from jaxkern.lm.data.build import build_packed as build_packed
from jaxkern.lm.data.build import has_shards as has_shards
from jaxkern.lm.data.build import open_packed as open_packed
from jaxkern.lm.data.build import open_shards as open_shards
from jaxkern.lm.data.build import open_tokenizer as open_tokenizer
from jaxkern.lm.data.corpus import Corpus as Corpus
from jaxkern.lm.data.corpus import build_corpus as build_corpus
from jaxkern.lm.data.corpus import check_length as check_length
from jaxkern.lm.data.corpus import open_corpus as open_corpus
from jaxkern.lm.data.corpus import train_batch as train_batch
from jaxkern.lm.data.corpus import validation_batches as validation_batches
from jaxkern.lm.data.files import write_atomically as write_atomically
from jaxkern.lm.data.packed import Packed as Packed
from jaxkern.lm.data.packed import PackedCorpus as PackedCorpus
from jaxkern.lm.data.tokenizer import SEPARATOR as SEPARATOR
from jaxkern.lm.data.tokenizer import dtype_of as dtype_of
from jaxkern.lm.data.tokenizer import size_of as size_of
