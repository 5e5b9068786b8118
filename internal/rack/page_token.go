package rack

import (
	"bytes"
	"compress/flate"
	"encoding/base64"
	"io"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// A starting token is the id of the last returned entry and, after a dot, the rack's token of the
// page on which the listing continues. CSI allows 128 bytes and the rack's token has about 200, so
// it is deflated. If it still does not fit it is left out: the listing then begins at the rack's
// first page and skips what was returned before.

// packToken returns the token that continues after an id; page is empty for the rack's first page.
func packToken(project, after, page string) string {
	raw, err := base64.URLEncoding.DecodeString(page)
	if err != nil || page == "" || base64.URLEncoding.EncodeToString(raw) != page {
		return after
	}
	var packed bytes.Buffer
	w, err := flate.NewWriterDict(&packed, flate.BestCompression, tokenDictionary(project))
	if err != nil {
		panic(err) // the level is valid
	}
	_, _ = w.Write(raw) // a buffer never fails
	_ = w.Close()
	token := after + "." + base64.RawURLEncoding.EncodeToString(packed.Bytes())
	if len(token) > volume.MaxStringBytes {
		return after
	}
	return token
}

// unpackToken parses a token of packToken and rejects everything else.
func unpackToken(project, token string) (after, page string, ok bool) {
	after, packed, paged := strings.Cut(token, ".")
	switch {
	case !volume.IsID(after) || len(token) > volume.MaxStringBytes:
		return "", "", false
	case !paged:
		return after, "", true
	}
	data, err := base64.RawURLEncoding.DecodeString(packed)
	if err != nil {
		return "", "", false
	}
	const most = 512 // of the rack's own token
	raw, err := io.ReadAll(io.LimitReader(
		flate.NewReaderDict(bytes.NewReader(data), tokenDictionary(project)), most))
	if err != nil {
		return "", "", false
	}
	page = base64.URLEncoding.EncodeToString(raw)
	return after, page, packToken(project, after, page) == token
}

// tokenDictionary returns what the rack's token is likely to contain. Only the length of our tokens
// depends on it.
func tokenDictionary(project string) []byte {
	return []byte(`{"v":"v1","page_start":{"sort_by":"id_ascending","project":"` + project +
		`","last_seen":""}}`)
}
