// Why a question has no answer.
class Refused extends Error {
  constructor({ code, message, hint }) {
    super(message);
    this.code = code;
    this.hint = hint;
  }
}
const wasReplaced = (error) => error instanceof Refused && error.code === "cancelled";
const inWords = (error) => (error.hint ? `${error.message}. Hint: ${error.hint}` : error.message);
