// Runs models in a worker: one text at a time, and of those that wait only the newest.
class Runner {
  constructor(data) {
    this.data = data;
    this.loaded = new Set();
    this.job = 0;
    this.waiting = null;
    this.running = null;
  }

  // Calls back with the share done, then with the text as the model read it, unless a newer text overtakes it.
  run(model, text, callbacks) {
    this.waiting = { model, text, callbacks, job: ++this.job };
    if (!this.running) this.next();
  }

  // Whatever is on its way is no longer wanted.
  forget() {
    this.job++;
    this.waiting = null;
  }

  next() {
    const { model, text, callbacks, job } = this.waiting;
    this.running = this.waiting;
    this.waiting = null;
    try {
      this.load(model);
      this.worker.postMessage({ kind: "run", model, text, job });
    } catch (error) {
      this.running = null;
      callbacks.failed(error);
    }
  }

  load(model) {
    if (!this.worker) {
      const source = document.getElementById("explorer-engine").textContent;
      this.worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
      this.worker.onmessage = ({ data }) => this.hear(data);
      this.worker.onerror = (event) => this.fail(event);
    }
    if (this.loaded.has(model)) return;
    const { live } = this.data.models[model];
    const weights = bytesOf(document.getElementById(live.weights).textContent);
    const { description, table } = live;
    const tokenizer = this.data.tokenizers[live.tokenizer];
    this.worker.postMessage({ kind: "load", model, description, table, weights, tokenizer }, [weights]);
    this.loaded.add(model);
  }

  hear(message) {
    const { callbacks, job } = this.running;
    if (message.kind === "progress") {
      if (job === this.job) callbacks.progress(message.share);
      return;
    }
    this.running = null;
    if (job === this.job) callbacks.done(message);
    if (this.waiting) this.next();
  }

  fail(event) {
    event.preventDefault();
    const { callbacks } = this.running;
    // A worker that failed may have failed half-way through loading.
    this.worker.terminate();
    this.worker = this.running = null;
    this.loaded.clear();
    callbacks.failed(event);
    if (this.waiting) this.next();
  }
}
