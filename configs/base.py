"""All keys with their units and defaults. The other configs in this folder state only what they change.

`--config.group.key=value` sets a key; unknown keys are errors. 0 or "" turns an option off, unless the comment says
otherwise.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the base config: RoBERTa-base at length 512 on the embedded corpus."""
    config = ConfigDict()

    config.corpus = ConfigDict()
    # docstrings (of the installed packages) | text:GLOB | jsonl:GLOB[#FIELD] | hf:NAME[:CONFIG][#SPLIT] |
    # tfds:NAME[#SPLIT]
    config.corpus.sources = ("docstrings",)  # one or several
    # copies of each document, one number per source: 0.5 keeps half, 2 writes all twice
    config.corpus.weights = (1.0,)
    # the text field of hf: and tfds: sources, and of jsonl: without #FIELD
    config.corpus.field = "text"
    config.corpus.streaming = False  # hf: sources: read over the network without a local copy
    # what is in one split as a whole: document | file | a field; "" = document, or a package
    config.corpus.group = ""
    # share of groups, by hash, of sources without a validation split
    config.corpus.validation_fraction = 0.01
    # the groups of the validation split; () or no group = by hash
    config.corpus.validation_groups = ()
    # the same of a test split, of sources without one; 0 = none is cut
    config.corpus.test_fraction = 0.0
    config.corpus.test_groups = ()  # the groups of the test split; () = by hash
    # Documents that are more similar to an earlier one than this are left out.
    # benchmarks, as sources: training documents that share 13 words in a row are left out
    config.corpus.keep_out = ()
    config.corpus.max_documents = 0  # documents to read from each split of each source; 0 = all

    config.tokenizer = ConfigDict()
    # folder or Hub name of an existing tokenizer; "" = train one into the workdir
    config.tokenizer.path = ""
    config.tokenizer.kind = "unigram"  # unigram | bpe (byte-level) | wordpiece
    config.tokenizer.vocab_size = 32_768  # entries, special tokens included
    config.tokenizer.sample_megabytes = 64.0  # text to train it on, in 10^6 bytes of UTF-8
    config.tokenizer.lowercase = False

    config.shards = ConfigDict()
    config.shards.dir = ""  # folder of the shards; "" = WORKDIR/shards
    config.shards.length = 512  # tokens per row
    # concatenated: all text, cut into rows without padding | lines: a text is a row, cut at the length and padded |
    # documents: whole documents packed into a row, see mlm/data/rows.py. Of a mixture, each folder has its own.
    config.shards.rows = "concatenated"
    config.shards.count = 64  # files of the training split; at least data.lanes
    # files of the validation split, and of the test split if there is one
    config.shards.validation_count = 8
    config.shards.workers = 0  # processes; 0 = one per core. Changes the speed, never the bytes

    config.data = ConfigDict()
    config.data.seed = 0  # of the order of records
    config.data.global_batch = 256  # rows per step, over all hosts, devices and accumulation steps
    # Smaller batches at the start, in this order: STEPS batches of ROWS rows each (a multiple of lanes and
    # train.accumulate, at most global_batch); then all have global_batch rows.
    config.data.batch_stages = ()  # ((ROWS, STEPS), ...)
    # virtual hosts: a multiple or a divisor of the number of hosts; fixed for the life of a run
    config.data.lanes = 8
    # Several folders of shards: each has its share of the lanes, so exactly that share of every batch, and its own
    # epochs. Write the shards beforehand, each folder's with a config of its own, all with the same tokenizer.
    config.data.mixture = ()  # (("FOLDER", SHARE), ...) instead of shards.dir; shares sum to 1
    # attention and positions restart at each document of a row
    config.data.isolate_documents = False
    # tokens per row in the first nine tenths of the steps: each row of shards.length is read as several
    config.data.short_length = 0
    # batches to leave out, "A:B" counted from 1; --skip-batches A:B adds one
    config.data.skip_batches = ()

    config.masking = ConfigDict()
    config.masking.seed = 0
    # token | word (whole words) | span (runs of words), see mlm/model/masking.py
    config.masking.kind = "token"
    config.masking.rate = 0.15  # share of the ordinary tokens to predict
    # share of those that the mask token replaces; random ordinary tokens replace half of the others, the rest is kept
    config.masking.mask_share = 0.8

    config.model = ConfigDict()
    # roberta (xlm_roberta, camembert) | roberta_prelayernorm | bert | modernbert
    config.model.family = "roberta"
    # mlm | transformers (its own Flax class: slower, dropout depends on the mesh)
    config.model.implementation = "mlm"
    config.model.hidden_size = 768
    config.model.layers = 12
    config.model.heads = 12
    config.model.intermediate_size = 3072
    # most tokens per row; RoBERTa's position table has pad id + 1 more entries
    config.model.positions = 512
    # modernbert: tokens that local layers see, half on each side, and the token; every third layer sees the whole row
    config.model.local_attention = 128
    config.model.global_rope_theta = 160_000.0  # modernbert: rotary base of global layers
    config.model.local_rope_theta = 10_000.0  # modernbert: of local layers
    config.model.activation = "gelu"  # gelu (exact) | gelu_new (tanh) | relu | silu
    config.model.hidden_dropout = 0.1
    config.model.attention_dropout = 0.1
    config.model.layer_norm_eps = 1e-5
    # stock (transformers') | primed (for short runs, see mlm/model/priming.py) | tiled (the smaller model of
    # train.init_from, wrapped around to fill these sizes, see mlm/pretrained/warm_start.py)
    config.model.init = "stock"
    config.model.init_stddev = 0.02
    config.model.dtype = "bfloat16"  # of activations: float32 | bfloat16. Parameters are float32
    # auto | xla | fused (TPU) | cudnn (GPU), mlm/model/attention.py
    config.model.attention = "auto"
    config.model.remat = False  # recompute each layer's activations in the backward pass
    # in so many layers, from the first: the feed-forward's, 8 of 14 activations
    config.model.remat_feed_forward = 0

    config.optimizer = ConfigDict()
    config.optimizer.name = "adamw"  # adamw | stable_adamw | lamb | lion | adafactor | muon
    config.optimizer.learning_rate = 6e-4  # the peak
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.98
    config.optimizer.eps = 1e-6
    config.optimizer.weight_decay = 0.01  # decoupled, for parameters of two dimensions or more
    config.optimizer.clip_norm = 0.0  # of the global gradient norm; 0 = off
    # muon: of Newton-Schulz per step; small batches on CPUs do better with 2
    config.optimizer.muon_iterations = 5
    # per step, of the averaged parameters that are evaluated; 0 = off
    config.optimizer.ema_decay = 0.0

    config.schedule = ConfigDict()
    # linear | cosine | inverse_sqrt | wsd (warmup-stable-decay) | wsd_sqrt | constant
    config.schedule.name = "linear"
    config.schedule.warmup = 0.0  # below 1, a share of all steps; from 1 on, steps
    config.schedule.decay_fraction = 0.1  # wsd, wsd_sqrt: share of all steps in the final decay
    config.schedule.final_fraction = 0.0  # learning rate at the end, as a share of the peak

    config.train = ConfigDict()
    config.train.steps = 100_000  # steps; or, with steps = 0:
    # passes over the training split; of a mixture, over the rows of all its folders together
    config.train.epochs = 0.0
    # Or hours, with both at 0: before it starts, the run times its step, and sets train.steps to what they are here.
    config.train.hours = 0.0  # of training time, evaluations and checkpoints left out
    config.train.seed = 0  # of the initial parameters and of dropout
    # Sizes and tokenizer are that model's, where the config has this file's values and the command line sets none:
    # mlm/pretrained/inherit.py.
    # workdir (or WORKDIR@STEP), folder of the family or Hub name; "" = random
    config.train.init_from = ""
    # A new workdir goes on after that step of another run, with its whole state: see mlm/training/branch.py.
    # WORKDIR@STEP; configs may differ in all but NEVER keys of mlm/config_rules.py
    config.train.branch_from = ""
    config.train.accumulate = 1  # microbatches per step

    # the command `classify`; train.init_from decides the sizes of the model
    config.classify = ConfigDict()
    # csv:FILE (.tsv too) | jsonl: | conll: | hf:NAME[:CONFIG][#SPLIT] | tfds:NAME[#SPLIT]
    config.classify.train = ""
    config.classify.validation = ""  # the same, rows to evaluate on after each epoch
    # the same, rows to score the best checkpoint on at the end; "" = none
    config.classify.test = ""
    # one column of text, or two for pairs; of tokens, a column of lists of words
    config.classify.text = ("text",)
    config.classify.label = "label"  # column of labels; of tokens, lists of them
    # Rows for the best checkpoint to predict, into predictions/NAME.tsv; those with labels are scored, too.
    config.classify.predict = ()  # (("NAME", SOURCE), ...)
    # Metrics whose mean chooses the best checkpoint: accuracy | f1 | f1_macro | f1_positive (of the second of two
    # classes) | matthews; of a regression pearson | spearman.
    config.classify.metric = ()  # () = accuracy; of spans f1; of a regression the loss
    # classes (strings or numbers) | regression (numbers) | tokens (of words)
    config.classify.kind = "classes"
    config.classify.length = 128  # tokens; longer rows are truncated

    # devices along each axis, and what it splits; the axis `data`, of the batch, has all that these two leave
    config.mesh = ConfigDict()
    config.mesh.fsdp = 1  # batch and parameters
    config.mesh.tensor = 1  # matrices

    config.evaluate = ConfigDict()
    # steps; 0 = only at the end. `classify` evaluates after each epoch, too
    config.evaluate.every = 1_000
    config.evaluate.batch = 256  # rows, over all hosts; the scores do not depend on it
    # The score of the run's own validation split decides which checkpoint is best. Of a mixture it is the mean over its
    # folders' splits, weighted by their shares as in training; each of these is logged as well, if this names no set.
    # (("NAME", "FOLDER"), ...): validation splits to score as well, logged as NAME/loss ...
    config.evaluate.sets = ()
    # Predictions: fixed (as in training) | independent (each token by masking.rate). The best checkpoint depends on it,
    # so it can't change on resume; the command `evaluate` takes either at any time.
    config.evaluate.count = "fixed"

    config.checkpoint = ConfigDict()
    config.checkpoint.every = 1_000  # steps; 0 = only at the end
    config.checkpoint.keep = 3  # newest ones to keep, besides the one with the best evaluation loss
    # "1000" (a step; "0" is the initial state), "every:5000" (steps), "words:1M" (words read, about; k, M or B),
    # "words:10M..100M" (10M, 20M and so on). Those of BabyLM are ("words:1M..10M", "words:10M..100M").
    config.checkpoint.milestones = ()  # steps that are evaluated, saved, and kept for good
    config.checkpoint.on_damage = "stop"  # stop (code 4) | fallback (to the newest good one)

    config.log = ConfigDict()
    config.log.every = 50  # steps between two lines of metrics.jsonl
    # steps between two lines of norms.jsonl; a step that has one holds the parameters twice
    config.log.norms_every = 0
    config.log.tensorboard = True
    config.log.wandb = ""  # project name; needs the wandb package
    # first of the five steps of a trace for TensorBoard or Perfetto; 0 = none
    config.log.profile_start = 0

    # The Hugging Face Hub: where a run pushes its model after each evaluation (mlm/export/hub.py), and what cards say.
    config.hub = ConfigDict()
    # USER/NAME of a private repository, which is created if it is missing; "" = no pushes
    config.hub.name = ""
    # of the model, as the Hub spells it, such as "apache-2.0"; "" = not said
    config.hub.license = ""
    # codes of the languages of the text, as in ("en", "de"); () = not said
    config.hub.language = ()

    # of several processes, and `hang` also of one on a TPU; see mlm/cluster/
    config.pod = ConfigDict()
    # Of jax's coordination service on process 0's host; Dask's, while data is made, is two above it on every host. Open
    # both to the hosts alone.
    config.pod.port = 8474
    config.pod.start_timeout = 600.0  # seconds that process 0 waits for the others to be ready
    # seconds without a sign of life after which a process counts as dead
    config.pod.heartbeat = 60.0
    # Seconds without progress after which a process exits with its stacks; four times as many while it starts, compiles
    # or saves.
    config.pod.hang = 900.0  # 0 = never

    # Keys of your own: a config file sets config.mine.NAME, a subclass of Pretraining reads self.config.mine.NAME.
    config.mine = ConfigDict()

    return config
