// Byte-level BPE, as the tokenizers library does it.
class Tokenizer {
  constructor({ pattern, bytes, merges, bos }) {
    this.pattern = new RegExp(pattern, "gu");
    this.byteIds = bytes;
    this.bos = bos;
    this.raw = new Map(bytes.map((id, byte) => [id, [byte]]));
    // Of a pair of ids: its rank among the merges, and what it becomes.
    this.merges = new Map();
    for (let k = 0; k < merges.length; k += 3) {
      const [left, right, result] = merges.slice(k, k + 3);
      const key = Tokenizer.pair(left, right);
      if (!this.merges.has(key)) this.merges.set(key, [k, result]);
      this.raw.set(result, [...this.raw.get(left), ...this.raw.get(right)]);
    }
  }

  static pair(left, right) {
    return left * 16777216 + right;
  }

  // The ids of a text after a BOS, and whether it goes on after the first `limit`.
  encode(text, limit = Infinity) {
    const ids = [this.bos];
    for (const word of this.words(text.toWellFormed ? text.toWellFormed() : text)) {
      if (ids.length > limit) break;
      for (const id of this.merge(new TextEncoder().encode(word))) ids.push(id);
    }
    return { ids: ids.slice(0, limit), isCut: ids.length > limit };
  }

  *words(text) {
    let end = 0;
    for (const match of text.matchAll(this.pattern)) {
      if (match.index > end) yield text.slice(end, match.index);
      if (match[0]) yield match[0];
      end = match.index + match[0].length;
    }
    if (end < text.length) yield text.slice(end);
  }

  // The first merge by rank, then by place, until there is none.
  merge(bytes) {
    const ids = Array.from(bytes, (byte) => this.byteIds[byte]);
    for (;;) {
      let best = null;
      let at = -1;
      for (let k = 0; k + 1 < ids.length; k++) {
        const found = this.merges.get(Tokenizer.pair(ids[k], ids[k + 1]));
        if (found && (best === null || found[0] < best[0])) {
          best = found;
          at = k;
        }
      }
      if (best === null) return ids;
      ids.splice(at, 2, best[1]);
    }
  }

  // A token as text; bytes that are not a whole character as <0xE2>.
  piece(id) {
    if (id === this.bos) return "<|bos|>";
    const raw = Uint8Array.from(this.raw.get(id));
    try {
      // Without ignoreBOM the decoder would swallow U+FEFF.
      return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(raw);
    } catch {
      return Array.from(raw, (byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`).join("");
    }
  }
}
