"""Files of text -> tokens on disk -> batches.

sources    what --data names: files of documents, found and read
tokenizer  bytes, a tokenizer.json, a BPE of the data
corpus     a run's tokens on disk, and the batches that grain draws from them
"""

from jaxkern.lm.data.corpus import Corpus as Corpus
from jaxkern.lm.data.corpus import Packed as Packed
from jaxkern.lm.data.corpus import build as build
from jaxkern.lm.data.corpus import has_tokens as has_tokens
from jaxkern.lm.data.corpus import locked as locked
from jaxkern.lm.data.corpus import open_tokenizer as open_tokenizer
from jaxkern.lm.data.corpus import predicted as predicted
from jaxkern.lm.data.corpus import put as put
from jaxkern.lm.data.corpus import reopen as reopen
from jaxkern.lm.data.corpus import tokens_per_byte as tokens_per_byte
from jaxkern.lm.data.corpus import write_atomically as write_atomically
from jaxkern.lm.data.tokenizer import dtype_of as dtype_of
from jaxkern.lm.data.tokenizer import size_of as size_of
