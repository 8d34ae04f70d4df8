// What the page and its worker say to each other: a model once, then texts.
const models = new Map();

onmessage = ({ data }) => {
  if (data.kind === "load") {
    const { description, table, weights, tokenizer } = data;
    models.set(data.model, { model: new Model(description, table, weights), tokenizer: new Tokenizer(tokenizer) });
    return;
  }
  const { model, tokenizer } = models.get(data.model);
  const { ids, isCut } = tokenizer.encode(data.text, model.context);
  const progress = (share) => postMessage({ kind: "progress", job: data.job, share });
  const { packed, surprise } = model.run(ids, progress);
  const pieces = ids.map((id) => tokenizer.piece(id));
  postMessage({ kind: "done", job: data.job, text: data.text, ids, pieces, isCut, surprise, packed }, [packed.buffer]);
};
