// How the site's search ranks what it finds: pages that answer questions before histories and lists of all that there is.
var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    if (kind === "title") score *= 3;
    // A row of a table of reference, which counts if all of its name was typed.
    if (kind === "index" && anchor.startsWith("#row-")) score = score === 100 ? 60 : score / 10;
    if (/^docs\/(how-to|tutorials)\//.test(page)) return score + 8;
    if (/^docs\/explanation\/(?!attacks)|^docs\/errors/.test(page)) return score + 4;
    if (/^(CHANGELOG|docs\/README|docs\/adr\/|docs\/explanation\/attacks|docs\/model\/|bench\/)/.test(page)) return score - 12;
    return score;
  },
  objNameMatch: 11, objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7,
  term: 5, partialTerm: 2,
};
