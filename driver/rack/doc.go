// Package rack is the driver's client of an Oxide rack: the SDK's client with the driver's token,
// reads whose answers are checked before anybody decides from them, lists that come to an end, and
// the rack's errors as the driver's.
//
// To read: client.go (how a client is made), token.go and transport.go (the token, and what every
// request passes), disk.go, snapshot.go, instance.go and validate.go (reads, and what an answer has
// to hold), paging.go and page_token.go (lists, cut into CSI's pages), errors.go (Oxide error to
// csierr).
//
// It never changes anything on a rack by itself: the caller does, through the SDK's methods that
// Client embeds.
package rack
