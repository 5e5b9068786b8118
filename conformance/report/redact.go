package report

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"html"
	"html/template"
	"io"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"
)

// redacted replaces a secret.
const redacted = "[redacted]"

// Redactor returns a replacer that replaces each secret with "[redacted]". It finds a secret
// unchanged; escaped for URLs, HTML and JSON; in hexadecimal digits; and in base64, where the
// secret may be a part of a longer text. It ignores a secret that consists of spaces only.
func Redactor(secrets ...string) *strings.Replacer {
	var found []string
	for _, secret := range secrets {
		found = append(append(found, forms(secret)...), forms(strings.TrimSpace(secret))...)
	}
	slices.SortFunc(found, func(a, b string) int { return len(b) - len(a) }) // the longest match first
	var pairs []string
	for _, form := range found {
		pairs = append(pairs, form, redacted)
	}
	return strings.NewReplacer(pairs...)
}

func forms(secret string) []string {
	if strings.TrimSpace(secret) == "" {
		return nil
	}
	quoted, _ := json.Marshal(secret) // a string always marshals
	inString := string(quoted[1 : len(quoted)-1])
	raw := strings.NewReplacer(`\u003c`, "<", `\u003e`, ">", `\u0026`, "&").Replace(inString)
	hexadecimal := hex.EncodeToString([]byte(secret))
	all := []string{
		secret, html.EscapeString(secret), template.HTMLEscapeString(secret),
		inString, raw, hexadecimal, strings.ToUpper(hexadecimal),
	}
	for _, escaped := range []string{url.QueryEscape(secret), url.PathEscape(secret)} {
		all = append(all, escaped, escape.ReplaceAllStringFunc(escaped, strings.ToLower))
	}
	return append(all, base64Forms(secret)...)
}

// escape matches %2F.
var escape = regexp.MustCompile(`%[0-9A-F]{2}`)

// base64Forms returns the characters that base64 of a longer text contains for the secret, for
// each position at which the secret can begin. The characters depend on bytes of the secret
// alone. Short results are left out, because they occur by chance.
func base64Forms(secret string) (all []string) {
	for _, encoding := range []*base64.Encoding{base64.StdEncoding, base64.URLEncoding} {
		all = append(all, encoding.EncodeToString([]byte(secret)))
		for before := range 3 {
			padded := strings.Repeat("\x00", before) + secret
			encoded := encoding.WithPadding(base64.NoPadding).EncodeToString([]byte(padded))
			first := (8*before + 5) / 6 // the first character that has only bits of the secret
			last := 8 * len(padded) / 6 // the first character behind them
			if last-first >= 8 {
				all = append(all, encoded[first:last])
			}
		}
	}
	return all
}

// scrub returns a copy of the report. Its strings are plain and contain no secret, and its slices
// and maps are not nil.
func (r *Report) scrub(secrets []string) *Report {
	replacer := Redactor(secrets...)
	clean := func(v reflect.Value) string { return Plain(replacer.Replace(v.String())) }
	scrubbed := copyOf(reflect.ValueOf(*r), clean).Interface().(Report)
	return &scrubbed
}

// copyOf returns a copy of a value with other strings.
func copyOf(v reflect.Value, clean func(reflect.Value) string) reflect.Value {
	if v.Type() == reflect.TypeFor[time.Time]() {
		return v
	}
	result := reflect.New(v.Type()).Elem()
	switch v.Kind() {
	case reflect.String:
		result.SetString(clean(v))
	case reflect.Struct:
		for i := range v.NumField() {
			result.Field(i).Set(copyOf(v.Field(i), clean))
		}
	case reflect.Slice:
		result.Set(reflect.MakeSlice(v.Type(), v.Len(), v.Len()))
		for i := range v.Len() {
			result.Index(i).Set(copyOf(v.Index(i), clean))
		}
	case reflect.Map:
		result.Set(reflect.MakeMapWithSize(v.Type(), v.Len()))
		for key, value := range v.Seq2() {
			result.SetMapIndex(copyOf(key, clean), copyOf(value, clean))
		}
	default:
		return v
	}
	return result
}

// Plain replaces everything in a text that a terminal or a page would interpret instead of
// showing it: control characters except line feeds and tabs, invisible marks, some of which
// change the direction of writing, and bytes that are not UTF-8. Texts of a rack may contain any
// of them.
func Plain(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Cf, r) ||
			unicode.Is(unicode.Zl, r) || unicode.Is(unicode.Zp, r)) {
			return unicode.ReplacementChar
		}
		return r
	}, strings.ToValidUTF8(text, string(unicode.ReplacementChar)))
}

// PlainWriter writes its text through Plain, without the secrets of Redact, which may be nil. Each
// Write must consist of whole characters.
type PlainWriter struct {
	To     io.Writer
	Redact *strings.Replacer
}

// Write writes the plain text.
func (w PlainWriter) Write(text []byte) (int, error) {
	clean := string(text)
	if w.Redact != nil {
		clean = w.Redact.Replace(clean)
	}
	if _, err := io.WriteString(w.To, Plain(clean)); err != nil {
		return 0, err
	}
	return len(text), nil
}
